"""The rows that the stages made, those that can be used, and the reasons for the difference, in sentences."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

from jaxalign.data.sources.reports import (
    WINDOW_REASONS,
    DemonstrationReport,
    JudgementReport,
    PreferenceReport,
    PromptReport,
    first_broken,
    rows_of_reason,
)
from jaxalign.reasons import (
    MOSTLY,
    advice,
    audit_warnings,
    few_usable,
    incomplete_answers,
    label_warnings,
    missing_verdicts_sentence,
    mostly_dropped,
    often_contradicted,
    pairs_sentence,
    self_agreement_sentence,
    usable_sentence,
    verdict_warning,
)
from jaxalign.tracking.accuracy import uninformative, unlearnt
from jaxalign.tracking.formatting import capitalized, percent, share
from jaxalign.tracking.measures import model_phrase
from jaxalign.tracking.report.roles import joined
from jaxalign.tracking.schedules import low_rate_sentence
from jaxalign.tracking.workdir import RunFiles, StageFiles

_REPORTS = {
    "prompts": (PromptReport, "{prompts:,} prompts kept"),
    "pairs": (PreferenceReport, "{pairs:,} pairs kept"),
    "desirable": (JudgementReport, "{desirable:,} good and {undesirable:,} bad answers kept"),
    "answers": (DemonstrationReport, "{answers:,} answers kept"),
}
"""By a field that only one kind of report on a file has: the report, and the rows kept, with fields of the report in braces."""


def row_sentences(run: RunFiles) -> list[str]:
    """Counts the rows of files, the answers and revisions, the labelled pairs, and the rows that training used."""
    sentences = list(_file_sentences(run))
    revised, trained, compared = _revised(run), run.stage("sft").summary, run.stage("compare").summary
    if revised:
        sentences.append(usable_sentence("answers and revisions", revised["total"], revised["usable"],
                                         revised.get("reasons") or {}, revised.get("kept")) + ".")
    if answers := trained.get("answers"):
        cut = ""
        if trained.get("cut"):
            cut = f"; {trained['cut']:,} of them, with their prompts, were cut to sft.row_length tokens"
        held_out = f" and {revised['usable'] - answers:,} were held out to measure the loss" if revised else ""
        sentences.append(f"Fine-tuning used {answers:,} answers{cut}{held_out}.")
    sentences += _partly_read(run)
    if compared.get("pairs"):
        sentences.append(pairs_sentence(compared) + ".")
        if missing := missing_verdicts_sentence(compared):
            sentences.append(missing + ".")
        if "margin" in compared["calibration"]:
            sentences.append(capitalized(self_agreement_sentence(compared)) + ".")
    return sentences


def _partly_read(run: RunFiles) -> Iterator[str]:
    """A sentence for each stage whose steps read a part of its rows."""
    for label, stage in run.runs.items():
        if "read_share" in stage.summary:
            steps, read = stage.summary["steps"], percent(stage.summary["read_share"])
            yield f"The {steps:,} steps of stage {label} read {read} of its rows."


def loss_sentences(run: RunFiles) -> list[str]:
    """Counts the rows that were dropped or cut, the few responses without a score and the answers that did not end, with their
    shares."""
    sentences = []
    for name, content in _files(run):
        reasons = [f"{share(count, content['rows'])} {meaning.replace('; ', ', ')}"
                   f"{_first(content) if field == 'broken' else ''}"
                   for field, meaning in (_REPORTS[name][0].reasons | WINDOW_REASONS).items()
                   if field not in _NO_LOSS and (count := rows_of_reason(content, field))]
        if reasons:
            kept = content[name] + content.get("undesirable", 0)
            sentences.append(f"Of the {content['rows']:,} rows of {content['path']}, {share(kept, content['rows'])} were kept; "
                             f"{'; '.join(reasons)}.")
    for label, stage in run.runs.items():
        for rows, count in stage.left_out.items():
            parts = [f"{share(count[part], count['total'])} were {words}" for part, words in _LEFT_OUT.items() if count[part]]
            sentences.append(f"Of the {count['total']:,} rows of {rows} in stage {label}, {' and '.join(parts)}.")
    sentences += [f"{capitalized(sentence)}." for sentence in _unscored(run, large=False)]
    sentences += _incomplete(run)
    return sentences


_NO_LOSS = ("evaluated", "in_red_team", "bad_margins", "repeated", "contradicted", "formatted")
"""Reasons of rows that are used, and whose text is not changed."""
_LEFT_OUT = {"dropped": "dropped because they did not fit or the text format rejected them",
             "cut": "cut at their oldest turns"}


_LARGE_UNSCORED = 0.05
"""The share of responses without a score from which a warning is needed."""


def _unscored(run: RunFiles, large: bool) -> Iterator[str]:
    """A sentence, without a full stop, for each round of stage ppo in which responses have no score.

    large: whether to select the rounds in which their share needs a warning, or the others.
    """
    batch = (run.config.get("ppo") or {}).get("batch")
    for label, stage in run.runs.items():
        _, counts = stage.column("no_score")
        unscored, total = int(sum(counts)), (batch or 0) * len(counts)
        if stage.name == "ppo" and unscored and total and (unscored / total >= _LARGE_UNSCORED) == large:
            yield (f"in stage {label}, {unscored:,} of {total:,} responses ({percent(unscored / total)}) had no score from the "
                   "reward and were not trained on")


def _incomplete(run: RunFiles) -> Iterator[str]:
    """Sentences on texts that were cut, or reached the length limit."""
    yield from _cut(run)
    revised = run.stage("revise").summary
    total = (revised.get("prompts") or 0) * (revised.get("rounds") or 1) + (revised.get("helpful_prompts") or 0)
    if revised.get("incomplete"):
        yield f"{share(revised['incomplete'], total)} of the answers and revisions did not end within revise.max_new_tokens."
    compared = run.stage("compare").summary
    if compared.get("incomplete"):
        unended, total = incomplete_answers(compared)
        yield (f"{share(unended, total)} of the compared answers did not end within compare.max_new_tokens; training treats "
               "them as complete.")
    for stage, words in (("online_dpo", "answers of the last iteration of online DPO"),
                         ("ppo", "responses of the last iteration of RL")):
        ended = [rate for rate in run.stage(stage).column("eos_rate")[1] if math.isfinite(rate)]
        if ended and ended[-1] < 1:
            yield f"{percent(1 - ended[-1])} of the {words} did not end within {stage}.max_new_tokens."
    ended_by_model = run.evaluation.get("complete") or {}
    unended = {model: 1 - rate for model, rate in ended_by_model.items() if rate is not None and rate < 1}
    if unended:
        shares = joined([f"{percent(rate)} for {model_phrase(model, run.used)}" for model, rate in unended.items()])
        yield f"Answers of the evaluation that did not end within evaluate.max_new_tokens: {shares}."


_CUT = {
    "pretrain": ("documents", 1, "documents of pretraining", "pretrain.row_length"),
    "sft": ("answers", 1, "answers of fine-tuning", "sft.row_length"),
    "preference": ("train_pairs", 2, "answers of the preference model's pairs, with their prompts,", "preference.max_length"),
    "best_of_n": ("chosen", 1, "answers chosen by best_of_n, with their prompts,", "best_of_n.row_length"),
    "dpo": (None, 1, "answers of DPO, with their prompts,", "dpo.max_length"),
}
"""By stage: the field of the summary that counts its rows (None: the texts of a row differ in number), the texts of a row, what
they are, and the field that cut them."""


def _cut(run: RunFiles) -> Iterator[str]:
    """A sentence for each stage and round in which texts lost tokens."""
    for label, stage in run.runs.items():
        name, _, place = label.partition(", ")
        if name in _CUT and (cut := stage.summary.get("cut")):
            total, each, texts, field = _CUT[name]
            where = f" in {place}" if place else ""
            yield f"{share(cut, each * (stage.summary.get(total) or 0))} of the {texts} were cut to {field}{where}."


def warnings(run: RunFiles) -> list[str]:
    """Sentences that start with "Warning", if rows were ignored, few can be used, a learning rate is low, many responses have
    no score, the judge's verdicts say little, or the preference model or stage dpo learnt nothing that the held-out pairs
    show."""
    problems, revised = [*_ignored(run), *_dropped(run), *_mostly_unread(run), *_low_rates(run)], _revised(run)
    limits = run.config.get("sft") or {}
    if revised and "min_rows" in limits and "min_share" in limits:
        sentence = few_usable(types.SimpleNamespace(**limits), revised["total"], revised["usable"])
        problems.append(sentence and f"{sentence}: {advice(revised.get('reasons') or {})}")
    limit = (run.config.get("compare") or {}).get("max_new_tokens")
    for place, stage in _rounds(run, "compare"):
        if stage.summary.get("pairs"):
            problems += [place + sentence for sentence in label_warnings(stage.summary, limit)]
    for place, stage in _rounds(run, "preference"):
        if sentence := "baselines" in stage.summary and uninformative(stage.summary):
            problems.append(place + sentence)
    for place, stage in _rounds(run, "dpo"):
        if sentence := "held_out" in stage.summary and unlearnt(stage.summary):
            problems.append(place + sentence)
    problems += [f"{sentence}; the log has the reason" for sentence in _unscored(run, large=True)]
    for row in run.evaluation.get("win_rates") or []:
        pair = joined([model_phrase(row[side], run.used) for side in ("model", "against")])
        problems.append(verdict_warning(row, pair) if row.get("total") else None)
    if run.audit:
        problems += audit_warnings(run.audit["audit"])
    return [f"Warning: {sentence}." for sentence in problems if sentence]


def _rounds(run: RunFiles, name: str) -> list[tuple[str, StageFiles]]:
    """The files of a stage in each round, each with the words that name the round in a warning; "" for the first one."""
    later = [(f"in round {number}, ", stages[name]) for number, stages in run.later.items() if name in stages]
    return [("", run.stage(name)), *later]


def _ignored(run: RunFiles) -> Iterator[str]:
    """A sentence for each stage whose rows no stage read although later ones trained."""
    for index, record in enumerate(run.records):
        trained = [later.name for later in run.records[index + 1 :] if later.trains and run.stage(later.name).started]
        if record.makes and run.stage(record.name).started and trained and record.name not in run.used:
            yield f"no stage trained on the rows of stage {record.name}; {joined(trained)} used other data"


def _dropped(run: RunFiles) -> Iterator[str | None]:
    """Sentences for each file of which more than half of the rows were dropped, or many rows contradict others."""
    for field, content in _files(run):
        kept = content[field] + content.get("undesirable", 0)
        yield mostly_dropped(content["path"], content["rows"], kept, rows_of_reason(content, "too_long"))
        yield often_contradicted(content["path"], kept, rows_of_reason(content, "contradicted"))


def _mostly_unread(run: RunFiles) -> Iterator[str]:
    """A sentence for each stage whose steps read less than half of its rows."""
    for label, stage in run.runs.items():
        if (read := stage.summary.get("read_share", 1.0)) < MOSTLY:
            yield f"stage {label} read only {percent(read)} of its rows; raise its steps or epochs"


def _low_rates(run: RunFiles) -> Iterator[str]:
    """A sentence for each stage whose learning rate is 0 or stays far below its peak."""
    for label, stage in run.runs.items():
        section = run.config.get(stage.name) or {}
        optimizer, steps = section.get("optimizer") or {}, stage.summary.get("steps")
        if stage.summary and "minibatches" in section:  # An iteration has several steps of the optimizer.
            steps = section["iterations"] * section["epochs"] * section["minibatches"]
        if steps and {"learning_rate", "warmup_steps"} <= optimizer.keys():
            if sentence := low_rate_sentence(optimizer["learning_rate"], optimizer["warmup_steps"], steps):
                yield f"in stage {label}, {sentence}"


def _revised(run: RunFiles) -> Mapping[str, Any]:
    """The report on the rows of stage revise that sft uses: of sft if it ended, else of revise; empty if there is none, or if
    policies were trained without them."""
    if "revise" not in run.used and any(run.stage(record.name).started for record in run.records if record.makes_policy):
        return {}
    for content in (run.stage("sft").summary.get("data"), run.stage("revise").summary.get("usable")):
        if content and "usable" in content:
            return content
    return {}


def _file_sentences(run: RunFiles) -> Iterator[str]:
    """What was read from each file, once. `loss_sentences` counts the rows that were dropped or cut."""
    for field, content in _files(run):
        report, kept = _REPORTS[field]
        reasons = [f"{count} {meaning.replace('; ', ', ')}" for name, meaning in (report.reasons | WINDOW_REASONS).items()
                   if name in _NO_LOSS and (count := rows_of_reason(content, name))]
        listed = f" ({'; '.join(reasons)})" if reasons else ""
        yield f"{content['path']}: {content['rows']:,} rows, {kept.format_map(content)}{listed}."


def _first(content: Mapping[str, Any]) -> str:
    """The reason of the first broken row of a report."""
    (place, *_), unit = content["broken"], content.get("unit", "line")
    return first_broken(unit, place["line"], place["reason"]).replace("; ", ", ")


def _files(run: RunFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(the field of `_REPORTS`, the report) for each file that a stage read, once."""
    shown = set()
    for stage in run.stages.values():
        data, human = (stage.summary.get(name) or {} for name in ("data", "human"))
        for content in (*data.get("files", [data] if "path" in data else []), *human.get("files", ())):
            field = next((field for field in _REPORTS if field in content), None)
            if field is not None and content["path"] not in shown:
                shown.add(content["path"])
                yield field, content
