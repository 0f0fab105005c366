"""The opening of the report: a summary of the run in sentences and a few headline numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxalign.tracking.formatting import capitalized, short_percent
from jaxalign.tracking.measures import MEASURES, model_phrase
from jaxalign.tracking.workdir import RunFiles


@dataclasses.dataclass(frozen=True)
class Headline:
    """A headline number. `change` is "better", "worse", "no clear change", or "" if no direction is better."""

    title: str
    before: str
    after: str
    change: str


def headlines(run: RunFiles) -> list[Headline]:
    """The first model against the last one, on each main measure; without rates, on scores, KL and length, or on losses."""
    found = []
    for name in ("correct", "harmful", "helpful", "evasive", "courteous", "focused"):
        rates = _by_model(run, name)
        if len(rates) > 1:
            (_, first), (_, last) = rates[0], rates[-1]
            found.append(Headline(MEASURES[name].title, short_percent(first["rate"]), short_percent(last["rate"]),
                                  change(first, last, MEASURES[name].good)))
    return found or _other_headlines(run)


def change(first: Mapping[str, float], last: Mapping[str, float], good: bool | None) -> str:
    """The direction of a change; "no clear change" if the 95% intervals before and after overlap."""
    if first["low"] <= last["high"] and last["low"] <= first["high"]:
        return "no clear change"
    if good is None:
        return ""
    return "better" if (last["rate"] > first["rate"]) == good else "worse"


def lead(run: RunFiles) -> list[str]:
    """The paragraphs of the opening, most important first. The paragraph on failed checks starts with "Warning"."""
    first, *others = _rate_sentences(run) or _other_sentences(run)
    warning, reassurance = _check_sentences(run)
    rest = " ".join([*others, *_method_sentences(run), *reassurance])
    return [paragraph for paragraph in (first, *warning, rest) if paragraph]


def _rate_sentences(run: RunFiles) -> list[str]:
    sentences = []
    harmful = _by_model(run, "harmful")
    if harmful:
        (model, first), later = harmful[0], harmful[1:]
        sentence = (f"{capitalized(model_phrase(model, run.planned))} gave the requested help for {first['count']:,} of "
                    f"{first['total']:,} harmful requests ({short_percent(first['rate'])})")
        parts = [f"{model_phrase(model, run.planned)} for {rate['count']:,} ({short_percent(rate['rate'])})"
                 for model, rate in later]
        sentences.append(f"{sentence}; {', and '.join(parts)}." if parts else f"{sentence}.")
    for name, opening in (("correct", "Answers were correct"), ("helpful", "Harmless requests received the right help"),
                          ("evasive", "Answers were evasive"), ("courteous", "Answers were courteous"),
                          ("focused", "Answers were to the point")):
        found = _by_model(run, name)
        if len(found) > 1:
            (_, first), (_, last) = found[0], found[-1]
            uncertain = change(first, last, True) == "no clear change"
            remark = ", a difference within the 95% intervals" if uncertain else ""
            sentences.append(f"{opening} {short_percent(first['rate'])} of the time before and "
                             f"{short_percent(last['rate'])} after{remark}.")
    return sentences


def _by_model(run: RunFiles, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(model, rate of the measure) for each model with a rate, in the order of the models."""
    rates = run.evaluation.get("rates") or {}
    found = [(model, (rates.get(model) or {}).get(name)) for model in run.models]
    return [(model, rate) for model, rate in found if rate and rate.get("total")]


def _other_sentences(run: RunFiles) -> list[str]:
    if not run.evaluation:
        return [run.absence("evaluate", "how the models behave")]
    sentences = _score_sentences(run)
    for row in run.evaluation.get("win_rates") or []:
        if row.get("total"):
            winner = capitalized(model_phrase(row["model"], run.planned))
            sentences.append(f"{winner} was preferred over {model_phrase(row['against'], run.planned)} in "
                             f"{short_percent(row['rate'])} of {row['total']:,} comparisons (95% interval "
                             f"{short_percent(row['low'])} to {short_percent(row['high'])}).")
    if run.evaluation.get("rates"):
        return [*sentences, "The rates of each model are below."]
    return [*sentences, no_rates(run)]


def no_rates(run: RunFiles) -> str:
    """A sentence for a run without verdicts on its answers. It names the quantities that compare the models instead."""
    names = {"preference_score": "preference score", "kl": "KL", "length": "length"}
    known = [name for field, name in names.items() if any(v is not None for v in (run.evaluation.get(field) or {}).values())]
    listed = " and ".join(filter(None, (", ".join(known[:-1]), known[-1]))) if known else "their answers only"
    return ("No judge knows the right answers to this run's prompts, so there are no rates; the models are compared by "
            f"{listed}.")


def _score_sentences(run: RunFiles) -> list[str]:
    scores, kl = run.evaluation.get("preference_score") or {}, run.evaluation.get("kl") or {}
    known = [model for model in run.models if scores.get(model) is not None]
    if len(known) < 2:
        return []
    first, last = known[0], known[-1]
    distance = "" if kl.get(last) is None else f", at a KL of {kl[last]:z.2f} nats per response"
    return [f"The preference model scores the answers of {model_phrase(first, run.planned)} {scores[first]:.2f} on "
            f"average, and those of {model_phrase(last, run.planned)} {scores[last]:.2f}{distance}."]


def _other_headlines(run: RunFiles) -> list[Headline]:
    found = []
    for field, title, digits in (("preference_score", "Preference score", 2), ("kl", "KL, nats per response", 2),
                                 ("length", "Response length, tokens", 1)):
        values = run.evaluation.get(field) or {}
        known = [values[model] for model in run.models if values.get(model) is not None]
        if len(known) > 1:
            found.append(Headline(title, f"{known[0]:z.{digits}f}", f"{known[-1]:z.{digits}f}", ""))
    if not found:
        for name, title in (("pretrain", "Pretraining loss"), ("sft", "Fine-tuning loss")):
            summary = run.stage(name).summary
            if summary.get("loss_first") is not None and summary.get("loss_last") is not None:
                found.append(Headline(title, f"{summary['loss_first']:.3f}", f"{summary['loss_last']:.3f}", ""))
    return found


def _method_sentences(run: RunFiles) -> list[str]:
    feedback = run.config.get("feedback") or {}
    sentences = []
    if feedback.get("constitution") and {"revise", "compare"} & set(run.planned):
        own = run.config.get("judge") or {}
        asked = [own.get(stage) or feedback.get("judge") or "local" for stage in ("revise", "compare") if stage in run.planned]
        judges = " and ".join(dict.fromkeys(asked))
        origin = "" if judges == "local" else f" and came from the judge {judges}"
        sentences.append(f"Feedback followed the constitution “{feedback['constitution']}”{origin}.")
    if feedback.get("invert") and "compare" in run.planned:
        sentences.append("The labels were inverted (feedback.invert): training favoured the answers that the constitution "
                         "disfavours.")
    return sentences


def _check_sentences(run: RunFiles) -> tuple[list[str], list[str]]:
    """(a warning about failed checks, a sentence that all checks passed); at least one of the two is empty."""
    checks = run.stage("ppo").summary.get("checks") or []
    failed = [check["name"] for check in checks if not check.get("passed")]
    if failed:
        warning = (f"Warning: {len(failed)} of {len(checks)} run-time checks of RL failed ({', '.join(failed)}); "
                   "do not trust the results of RL until the failure is explained.")
        return [warning], []
    return [], [f"All {len(checks)} run-time checks of RL passed."] if checks else []
