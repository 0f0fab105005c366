"""The opening of the report: a summary of the run in sentences, and the explanations of the terms in it."""

from __future__ import annotations

import math
import re

from jaxalign.config import rounds
from jaxalign.reasons import without_verdict
from jaxalign.tracking.alerts import alerts_of
from jaxalign.tracking.differences import UNKNOWN, WITHIN
from jaxalign.tracking.drift import drift
from jaxalign.tracking.estimates import MAIN, EvaluatedModel, compared_measures
from jaxalign.tracking.formatting import capitalized, decimal, short_percent
from jaxalign.tracking.measures import MEASURES, model_phrase, quantities
from jaxalign.tracking.report.alarms import fired_alarms
from jaxalign.tracking.report.changes import change_sentences
from jaxalign.tracking.report.headlines import change, moved, rates_by_model
from jaxalign.tracking.report.roles import joined, role_sentences
from jaxalign.tracking.report.rubrics import rubric_sentences, second_judge_sentence
from jaxalign.tracking.report.usable import loss_sentences, row_sentences, warnings
from jaxalign.tracking.workdir import RunFiles

_REMEDY = re.compile(r"run the same command again|run again: a stage continues|again with --overwrite")
"""What the reason of a failure says if it has the remedy itself."""


def lead(run: RunFiles) -> list[str]:
    """The paragraphs of the opening: warnings, which start with "Warning" (first of all that no second judge was asked), the
    first result, the rates by rubrics, the changes in training, the rows that were left out, the other results, the models'
    roles, and the rows."""
    first, *others = _rate_sentences(run) or _other_sentences(run)
    failed, passed = _check_sentences(run)
    results = " ".join([*others, *conflict_sentences(run), *passed])
    method = role_sentences(run)
    if (run.config.get("feedback") or {}).get("invert") and run.stage("compare").started:
        effect = ": training favoured the answers that the constitution disfavours" if "compare" in run.used else ""
        method.append(f"The labels were inverted (feedback.invert){effect}.")
    alarms = [f"Warning: an alarm of stage ppo fired. {alarm.sentence()}" for alarm in fired_alarms(run)]
    alarms += [f"Warning: stage {stage}, step {alert.step:,}. {alert.text()}" for stage, files in run.runs.items()
               for alert in alerts_of(row for row in files.metrics if "step" in row)]
    losses, rows = " ".join(loss_sentences(run)), " ".join(row_sentences(run))
    changed = " ".join(change_sentences(run))
    paragraphs = (*second_judge_sentence(run), *failed, *alarms, *warnings(run), first,
                  " ".join(rubric_sentences(run)), changed, losses, results, " ".join(method), rows)
    return [paragraph for paragraph in paragraphs if paragraph]


def end_sentence(run: RunFiles) -> str:
    """The stage in which the run failed or was interrupted, the reason, and how to resume it; "" for other runs."""
    if run.end is None:
        return ""
    where = f" in stage {run.end.stage}" if run.end.stage else ""
    reason = run.end.reason.rstrip(".")
    if run.failure is None:
        return f"The run was interrupted{where}{': ' * bool(reason)}{reason}. The same command resumes it."
    remedy = "" if _REMEDY.search(reason) else (
        " When the cause is corrected, the same command resumes the run, or lists the stages that the change makes out of "
        "date.")
    return f"The run failed{where}: {reason or 'the log of the run has the reason'}.{remedy}"


def _rate_sentences(run: RunFiles) -> list[str]:
    sentences = []
    harmful = rates_by_model(run, "harmful")
    if harmful:
        (model, first), later = harmful[0], harmful[1:]
        sentence = (f"{capitalized(model_phrase(model, run.used))} gave the requested help for {first['count']:,} of "
                    f"{first['total']:,} harmful requests ({short_percent(first['rate'])})")
        parts = [f"{model_phrase(model, run.used)} for {rate['count']:,} ({short_percent(rate['rate'])})"
                 for model, rate in later]
        listed = ", and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
        sentences.append(f"{sentence}; {listed}." if parts else f"{sentence}.")
    for name, opening in (("correct", "Answers were correct"), ("helpful", "Harmless requests received the right help"),
                          ("evasive", "Answers were evasive"), ("courteous", "Answers were courteous"),
                          ("focused", "Answers were to the point")):
        rates = rates_by_model(run, name)
        if len(rates) > 1:
            (_, first), (_, last) = rates[0], rates[-1]
            uncertain = first["rate"] != last["rate"] and change(first, last, True) == "no clear change"
            remark = ", a difference within noise" if uncertain else ""
            sentences.append(f"{opening} {short_percent(first['rate'])} of the time before and "
                             f"{short_percent(last['rate'])} after{remark}.")
    return sentences


def _other_sentences(run: RunFiles) -> list[str]:
    if not run.evaluation:
        return [run.absence("evaluate", "how the models behave"), *_reward_sentence(run)]
    sentences = _score_sentences(run)
    for row in run.evaluation.get("win_rates") or []:
        if row.get("total"):
            unclear = ", which is no clear preference" if row["low"] <= 0.5 <= row["high"] else ""
            unread = sum(without_verdict(row.get("outcomes") or {}).values())
            silent = f"; the judge gave no verdict on {unread:,} of them, and each counts as a tie" if unread else ""
            winner = capitalized(model_phrase(row["model"], run.used))
            sentences.append(f"{winner} was preferred over {model_phrase(row['against'], run.used)} in "
                             f"{short_percent(row['rate'])} of {row['total']:,} comparisons (95% interval "
                             f"{short_percent(row['low'])} to {short_percent(row['high'])}){unclear}{silent}.")
    if run.evaluation.get("rates"):
        return [*sentences, "The rates of each model are below."]
    return [*sentences, no_rates(run)]


def no_rates(run: RunFiles) -> str:
    """A sentence for a run without verdicts on its answers. It names the quantities that compare the models instead."""
    names = {"preference_score": "preference score", "kl": "KL", "length": "length"}
    known = [name for field, name in names.items() if any(v is not None for v in (run.evaluation.get(field) or {}).values())]
    known = ["win rate"] * bool(run.evaluation.get("win_rates")) + known
    known += ["rates by rubrics"] * bool(run.evaluation.get("rubrics"))
    means = joined(known) if known else "their answers only"
    compared = f"; the models are compared by {means}" if len(run.models) > 1 else ""
    rates = "no rates by rules" if run.evaluation.get("rubrics") else "no rates"
    return f"No rules decide which answers to this run's prompts are right, so there are {rates}{compared}."


def _reward_sentence(run: RunFiles) -> list[str]:
    """The score of the first and the last iteration of RL with a score, for a run without an evaluation. With enough iterations
    for an interval, the section on changes states the score: single iterations may differ by noise only."""
    _, iterations = run.stage("ppo").column("score")
    if not iterations:
        return []
    start = f"RL started from {model_phrase(run.start_of('ppo'), run.used)}"
    scores = [score for score in iterations if math.isfinite(score)]
    if not scores:
        return [f"{start}; no answer in training had a score."]
    if drift(scores) is not None:
        return [f"{start}."]
    scored = "" if len(scores) == len(iterations) else " with a score"
    first, last = (decimal(score, 2) for score in (scores[0], scores[-1]))
    if len(scores) == 1:
        return [f"{start}; the mean score of its answers in training was {first} in the only iteration{scored}."]
    return [f"{start}; the mean score of its answers in training was {first} in the first iteration{scored} and {last} in the "
            f"last. {len(scores)} iterations are too few to show a trend."]


def _score_sentences(run: RunFiles) -> list[str]:
    scores, kl = run.evaluation.get("preference_score") or {}, run.evaluation.get("kl") or {}
    known = [model for model in run.models if scores.get(model) is not None]
    if len(known) < 2:
        return []
    last = known[-1]
    stage, number = rounds.parse(last)
    first = run.start_of(stage) if number == 1 else known[-2]
    first = first if first in known else known[0]  # The model from which the training of `last` started has no score.
    before, after, direction = decimal(scores[first], 2), decimal(scores[last], 2), moved(scores[first], scores[last], 2)
    start = model_phrase(run.kl_reference, run.used)
    distance = "" if kl.get(last) is None else f", at a KL to {start} of {decimal(kl[last], 2)} nats per response"
    change_words = f"is {after}, as for" if before == after else f"{direction} to {after} from {before} for"
    remark = "" if before == after else _REMARKS.get(_score_verdict(run, first, last), "")
    return [f"The mean score before normalisation that {_scorer(run)} gives to the answers of {model_phrase(last, run.used)} "
            f"{change_words} {model_phrase(first, run.used)}, from which its training started{distance}{remark}."]


def _scorer(run: RunFiles) -> str:
    """The preference model that scored the answers of the evaluation: that of the first round if each round has one."""
    return "the preference model" + " of round 1" * ("preference" in run.by_round.get(1, {}))


_REMARKS = {WITHIN: "; the difference is within noise",
            UNKNOWN: "; there are too few answers to tell whether the difference is noise"}


def _score_verdict(run: RunFiles, first: str, last: str) -> str:
    """The verdict on the difference of the preference scores of two models (`Difference.verdict`)."""
    rows = list(run.rows("evaluate"))
    models = [EvaluatedModel(run, name, [row for row in rows if row["model"] == name]) for name in (first, last)]
    scores = next(one for one in compared_measures(models) if one.name == "preference_score")
    return scores.differences()[1].verdict


def conflict_sentences(run: RunFiles) -> list[str]:
    """A sentence for each comparison in which the preference model and the judge prefer different models."""
    scores, sentences = run.evaluation.get("preference_score") or {}, []
    for row in run.evaluation.get("win_rates") or []:
        later, earlier = scores.get(row["model"]), scores.get(row["against"])
        if later is None or earlier is None or not row.get("total"):
            continue
        later_wins, earlier_wins = row["low"] > 0.5, row["high"] < 0.5
        if (later > earlier and earlier_wins) or (later < earlier and later_wins):
            model, against = (model_phrase(row[side], run.used) for side in ("model", "against"))
            order, preferred, ending = ("lower", model, "the preference model disagrees with the judge")
            if later > earlier:
                order, preferred, ending = ("higher", against, "the preference model may have been exploited")
            interval = f"{short_percent(row['low'])} to {short_percent(row['high'])}"
            sentences.append(f"{capitalized(_scorer(run))} scores the answers of {model} {order} than those of {against}, but "
                             f"the judge prefers {preferred} (win rate of {model} {short_percent(row['rate'])}, 95% interval "
                             f"{interval}): {ending}.")
    return sentences


def _check_sentences(run: RunFiles) -> tuple[list[str], list[str]]:
    """(a warning about failed checks, a sentence that all checks passed); at least one of the two is empty."""
    rounds = [(number, stages["ppo"]) for number, stages in run.later.items() if "ppo" in stages]
    checks = [(check["name"] + (f" in round {number}" if number > 1 else ""), check.get("passed"))
              for number, stage in [(1, run.stage("ppo")), *rounds] for check in stage.summary.get("checks") or []]
    failed = [name for name, passed in checks if not passed]
    if failed:
        warning = (f"Warning: {len(failed)} of {len(checks)} run-time checks of RL failed ({', '.join(failed)}); "
                   "do not trust the results of RL until the failure is explained.")
        return [warning], []
    return [], [f"All {len(checks)} run-time checks of RL passed."] if checks else []


def terms(run: RunFiles) -> list[tuple[str, str, str]]:
    """(term, explanation, place in the documentation) for the numbers that the first section shows."""
    shown, evaluation = [], run.evaluation
    rates = {name for row in (evaluation.get("rates") or {}).values() for name in row or {}}
    for name, about in MEASURES.items():
        if name in rates and name in MAIN:
            page = "docs/rewards.md" if name == "correct" else "docs/world.md, “The gold judge”"
            shown.append((about.title, f"the share of {about.meaning}", page))
    compared = evaluation.get("win_rates") and (not rates or conflict_sentences(run))
    if rates or compared:
        shown.append(("95% interval", "for a rate the Wilson interval, for a mean the normal approximation: the values "
                      "that agree with the prompts that were asked",
                      _FILES))
    if len(run.models) > 1:
        shown.append(("More than noise", "the 95% interval of a difference does not contain 0; otherwise it is within noise",
                      "docs/watching.md, “What changed”"))
    if compared:
        shown.append(("Win rate", "the share of prompts for which the judge prefers the answer of one model over that of the "
                      "other, asked in both orders; an undecided or equal pair counts as half a win", _FILES))
    for quantity in () if rates else quantities(run.kl_reference):
        if any(value is not None for value in (evaluation.get(quantity.field) or {}).values()):
            shown.append((quantity.title, *_QUANTITIES[quantity.field]))
    if run.stage("revise").summary:
        shown.append(("Can be trained on", "a row whose text ended and was not refused; sft.keep admits further rows, and "
                      "sft.rounds_used selects the rounds", "docs/algorithms/supervised_cai.md, “Details”"))
    if run.stage("compare").summary:
        shown.append(("Decided label", "the judge prefers the same answer in both orders, and the mean over the orders differs "
                      "from 0.5 by more than the margin", "docs/labels.md, “From log-probabilities to a label”"))
    if run.stage("ppo").summary.get("checks"):
        shown.append(("Run-time checks", "measurements before the first update that detect errors of the implementation or of "
                      "the settings", "docs/ppo.md, “Checks”"))
    if not run.evaluation and (run.stage("pretrain").summary or run.stage("sft").summary):
        shown.append(("Loss", "the mean cross-entropy, in nats per token, of the first step and of the last 10 steps", _FILES))
    return shown


_FILES = "docs/data_formats.md, “Files of the stages”"
_QUANTITIES = {
    "kl": ("how far the model has moved from the reference: the mean over its answers of log P(answer) under the model minus "
           "log P(answer) under the reference", "docs/ppo.md, “KL to the reference”"),
    "length": ("the mean number of tokens of an answer", _FILES),
    "preference_score": ("the mean score that the preference model gives to the answers; only differences have a meaning. The "
                         "scores of RL, of its alarms and of the answers during RL are normalised instead: the shift of the "
                         "preference model is subtracted, and the result is divided by its scale",
                         "docs/algorithms/preference_model.md, “Formula”"),
    "reward": ("the mean score that the function reward.callable gives to the answers that it can score", "docs/rewards.md"),
    "repetition": ("the mean share of the 4-grams of words of an answer that occur earlier in it", "docs/win_rates.md"),
    "text_loss": ("the mean negative log-probability of the tokens of evaluate.texts", "docs/win_rates.md"),
    "text_loss_per_byte": ("the negative log-probability of the texts of evaluate.texts divided by their bytes in UTF-8",
                           "docs/win_rates.md"),
}
