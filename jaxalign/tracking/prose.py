"""The report's opening: what happened, in plain sentences and a few headline numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxalign.tracking.measures import MEASURES, model_title, percent
from jaxalign.tracking.workdir import RunFiles

NO_GOLD = ("The prompts of this run have no gold judge, so there are no harmful or helpful rates; what there is, is how "
           "the models compare by the labeller, the preference model and their distance in KL.")


@dataclasses.dataclass(frozen=True)
class Headline:
    """One number of the opening. `change` is "better", "worse", "no clear change" or "" where neither is meant."""

    title: str
    before: str
    after: str
    change: str


def headlines(run: RunFiles) -> list[Headline]:
    """The first model against the last one on each main measure; without a gold judge, what there is instead."""
    found = []
    rates, models = run.evaluation.get("rates") or {}, run.evaluation.get("models") or []
    for name in ("harmful", "helpful", "evasive", "courteous", "focused"):
        first, last = ((rates.get(model) or {}).get(name) for model in (models[:1] + models[-1:]) or ("", ""))
        if first and last and first.get("total") and last.get("total"):
            found.append(Headline(MEASURES[name].title, percent(first["rate"]), percent(last["rate"]),
                                  change(first, last, MEASURES[name].good)))
    return found or _other_headlines(run)


def change(first: Mapping[str, float], last: Mapping[str, float], good: bool | None) -> str:
    """Whether a rate moved for certain: its 95% intervals before and after do not touch."""
    if first["low"] <= last["high"] and last["low"] <= first["high"]:
        return "no clear change"
    if good is None:
        return ""
    return "better" if (last["rate"] > first["rate"]) == good else "worse"


def lead(run: RunFiles) -> list[str]:
    """The opening's sentences, most important first."""
    sentences = _rate_sentences(run) or _other_sentences(run)
    return [*sentences, *_method_sentences(run), *_check_sentences(run)]


def _rate_sentences(run: RunFiles) -> list[str]:
    rates, models = run.evaluation.get("rates") or {}, run.evaluation.get("models") or []
    sentences = []
    harmful = _by_model(rates, models, "harmful")
    if harmful:
        model, first = harmful[0]
        parts = [f"the {model_title(model, run.planned)} model gave the help {first['count']:,} times "
                 f"({percent(first['rate'])})" if model == "base" else _count(model, first, run)]
        parts += [_count(model, rate, run) for model, rate in harmful[1:]]
        sentences.append(f"Of {first['total']:,} harmful requests, {', '.join(parts)}.")
    for name, opening in (("helpful", "Harmless requests got the right help"), ("evasive", "Answers were evasive"),
                          ("courteous", "Answers were courteous")):
        found = _by_model(rates, models, name)
        if len(found) > 1:
            (_, first), (_, last) = found[0], found[-1]
            certain = change(first, last, True)
            remark = ", a difference within the 95% intervals" if certain == "no clear change" else ""
            sentences.append(f"{opening} {percent(first['rate'])} of the time before and {percent(last['rate'])} "
                             f"after{remark}.")
    return sentences


def _count(model: str, rate: Mapping[str, Any], run: RunFiles) -> str:
    return f"{model_title(model, run.planned)} {rate['count']:,} times ({percent(rate['rate'])})"


def _by_model(rates: Mapping[str, Any], models: list[str], name: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(model, (rates.get(model) or {}).get(name)) for model in models]
    return [(model, rate) for model, rate in found if rate and rate.get("total")]


def _other_sentences(run: RunFiles) -> list[str]:
    if not run.evaluation:
        return [run.absence("evaluate", "how the models behave")]
    sentences = [NO_GOLD]
    for row in run.evaluation.get("win_rates") or []:
        if row.get("total"):
            sentences.append(f"The model {model_title(row['model'], run.planned)} was preferred over the model "
                             f"{model_title(row['against'], run.planned)} in {percent(row['rate'])} of "
                             f"{row['total']:,} comparisons (95% interval {percent(row['low'])} to "
                             f"{percent(row['high'])}).")
    return sentences


def _other_headlines(run: RunFiles) -> list[Headline]:
    found = []
    for field, title, digits in (("preference_score", "Preference score", 2), ("kl", "KL, nats a response", 2),
                                 ("length", "Response length, tokens", 1)):
        values = run.evaluation.get(field) or {}
        known = [values[model] for model in run.evaluation.get("models") or [] if values.get(model) is not None]
        if len(known) > 1:
            found.append(Headline(title, f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}", ""))
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
        sentences.append(f"The feedback came from the constitution “{feedback['constitution']}”, applied by "
                         "the model itself.")
    if feedback.get("invert"):
        sentences.append("The labels were turned round (feedback.invert), so RL was asked for the opposite of what "
                         "the constitution prefers.")
    return sentences


def _check_sentences(run: RunFiles) -> list[str]:
    checks = run.stage("ppo").summary.get("checks") or []
    failed = [check["name"] for check in checks if not check.get("passed")]
    if failed:
        warning = (f"Warning: {len(failed)} of {len(checks)} run-time checks of RL failed ({', '.join(failed)}); "
                   "distrust the RL results until that is explained.")
        return [warning]
    return [f"All {len(checks)} run-time checks of RL passed."] if checks else []
