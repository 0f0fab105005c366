"""Rates by rubrics: who judged, the rates with their uncertainty, and refusal phrases, which are counted apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from jaxalign.tracking.differences import MORE, WITHIN
from jaxalign.tracking.formatting import capitalized, number, percent, percent_interval, rate_cell, short_percent
from jaxalign.tracking.measures import model_column, model_phrase, model_title
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import FIRST, Figure, ReportSection, Table
from jaxalign.tracking.report.plots import Interval
from jaxalign.tracking.report.roles import joined, judge_models, judge_phrase, judging_stages
from jaxalign.tracking.workdir import RunFiles

_LEVEL = 0.05
"""A difference whose p-value is below this is more than noise."""


def rubric_rates(run: RunFiles) -> list[ReportSection]:
    """The section of the rates by rubrics; none if the judge rated no answers."""
    rated = run.evaluation.get("rubrics") or {}
    if not rated:
        return []
    figures = []
    for rubric in rated["rubrics"]:
        rates = [(model, rated["rates"][model][rubric["name"]]) for model in run.models]
        bars = [Interval(model_title(model, run.used), rate["rate"], rate["low"], rate["high"],
                         f"{rate['count']:,} of {rate['total']:,}", tone)
                for tone, (model, rate) in enumerate(rates) if rate["total"]]
        if bars:
            title = f"{capitalized(rubric['name'])}, by the judge"
            figures.append(Figure(title, Markup(plots.interval_bars(title, bars)), _caption(rubric, rated["margin"])))
    intro = " ".join((judge_sentence(run), _uncertainty(run)))
    tables = (_rate_table(run), *_kind_table(run), _difference_table(run), _phrase_table(run))
    return [ReportSection("rubrics", "Rates by a rubric judge", intro, figures=tuple(figures), tables=tables, nav="Rubrics",
                          order=FIRST)]


def _caption(rubric: Mapping[str, Any], margin: float) -> str:
    side, sign = ("below", -1) if rubric["counts"] == "low" else ("above", 1)
    bound = number(rubric["cut"] + sign * margin)
    limit = f"of {bound} or {'less' if sign < 0 else 'more'}" if margin else f"{side} {bound}"
    kinds = f" Prompts: {joined(rubric['kinds'])}." if rubric["kinds"] else ""
    return f"Counts ratings {limit} for the question: {rubric['question']}{kinds}"


def _rate_table(run: RunFiles) -> Table:
    rated, rows = run.evaluation["rubrics"], []
    for rubric in rated["rubrics"]:
        rates = [rated["rates"][model][rubric["name"]] for model in run.models]
        rows.append([rubric["name"], *map(rate_cell, rates)])
        rows.append([f"{rubric['name']}, undecided", *(f"{rate['undecided']:,} of {rate['total'] + rate['undecided']:,}"
                                                       for rate in rates)])
        rows.append([f"{rubric['name']}, if none or all undecided answers count",
                     *(f"{percent(rate['least'])} to {percent(rate['most'])}" for rate in rates)])
    caption = "Rates of the decided answers with 95% Wilson intervals. An undecided answer is in no rate."
    return Table(caption, ["Rubric", *(model_column(model, run.used) for model in run.models)], rows)


def _kind_table(run: RunFiles) -> list[Table]:
    """The rates over the prompts of each kind; no table if the prompts have one kind or none."""
    by_kind = run.evaluation["rubrics"]["by_kind"]
    rows = [[kind, rubric, *(rate_cell(rates[model][rubric]) for model in run.models)]
            for kind, rates in by_kind.items() for rubric in rates[run.models[0]]]
    header = ["Prompts", "Rubric", *(model_column(model, run.used) for model in run.models)]
    caption = "Rates of the decided answers by the kind of the prompt, with 95% Wilson intervals."
    return [Table(caption, header, rows)] if len(by_kind) > 1 else []


def _difference_table(run: RunFiles) -> Table:
    rows = []
    for found in run.evaluation["rubrics"]["differences"]:
        low, high = (f"{100 * found[bound]:+z.1f}" for bound in ("low", "high"))
        models = f"{model_title(found['model'], run.used)} against {model_title(found['against'], run.used)}"
        rows.append([found["rubric"], models,
                     f"{100 * found['difference']:+z.1f} points\n{low} to {high}", f"{found['gained']:,}", f"{found['lost']:,}",
                     f"{found['pairs']:,}", _p(found["p"]), _verdict(found)])
    caption = ("Differences over the prompts to which both answers are decided, with 95% intervals (Agresti and Min 2005) and "
               "the exact test of McNemar. Gained and lost are the prompts at which only the later, or only the earlier answer "
               "counts.")
    return Table(caption, ["Rubric", "Models", "Difference", "Gained", "Lost", "Prompts", "p", "Verdict"], rows)


def _phrase_table(run: RunFiles) -> Table:
    phrases = run.evaluation["rubrics"]["refusal_phrases"]
    rows = [[f"{kind} prompts", *(rate_cell(phrases[model][kind]) for model in run.models)] for kind in phrases[run.models[0]]]
    caption = ("Answers that contain a refusal phrase, such as “I cannot” or “I'm sorry”, with 95% Wilson intervals. The "
               "phrases are counted in the text. No judge is asked, and an answer with a phrase may still help.")
    return Table(caption, ["Prompts", *(model_column(model, run.used) for model in run.models)], rows)


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(found: Mapping[str, Any]) -> str:
    return MORE if found["p"] < _LEVEL else WITHIN


def judge_sentence(run: RunFiles) -> str:
    """Who rated the answers, and whether this judge labelled training data."""
    judge, stages = capitalized(judge_phrase(run, "evaluate")), _shared_stages(run)
    if stages:
        return f"{judge} rated the answers. It also judged in training ({joined(stages)})."
    if _is_base(run):
        return f"{judge}, from which the policies were trained, rated the answers."
    return f"{judge} rated the answers. It judged in no stage of training."


def second_judge_sentence(run: RunFiles) -> list[str]:
    """A warning that no second judge rated the answers; empty with a second judge, or without rates by rubrics."""
    if not run.evaluation.get("rubrics"):
        return []
    stages = _shared_stages(run)
    if not stages and not _is_base(run):
        return []
    reason = f"also judged in training ({joined(stages)})" if stages else "is the model from which the policies were trained"
    return [f"Warning: no second judge was asked. The rates by rubrics are by {judge_phrase(run, 'evaluate')}, which {reason}, "
            "so they may favour the trained models. Name a judge that did not train the policy in judge.evaluate."]


def _is_base(run: RunFiles) -> bool:
    """Whether the base model, or a policy of the run, rated the answers."""
    base = (run.config.get("model") or {}).get("path")
    judges = judge_models(run, "evaluate")
    return "local" in judges or bool(base and base in judges)


def _shared_stages(run: RunFiles) -> list[str]:
    """The stages of training in which the judge of the evaluation, or a member of its jury, judged too."""
    judges = judge_models(run, "evaluate")
    return [stage for stage in judging_stages(run) if stage != "evaluate" and judges & judge_models(run, stage)]


def _uncertainty(run: RunFiles) -> str:
    """How certain the rates are: who checked them, and the undecided ratings."""
    rated = run.evaluation["rubrics"]
    rates = [rate for of_model in rated["rates"].values() for rate in of_model.values()]
    undecided, total = (sum(rate["undecided"] for rate in rates), sum(rate["total"] + rate["undecided"] for rate in rates))
    checked = "" if run.evaluation.get("rates") else " No rule and no person checked them."
    return (f"These rates are a judge's opinions.{checked} Their intervals cover the choice of prompts and not the judge's "
            f"mistakes. {undecided:,} of {total:,} ratings are undecided (no rating, or one closer than "
            f"{number(rated['margin'])} to the cut).")


def rubric_sentences(run: RunFiles) -> list[str]:
    """The rates of the first and the last model by each rubric, whether they differ, and the uncertainty, for the opening."""
    rated = run.evaluation.get("rubrics") or {}
    sentences = [_change(run, rated, rubric["name"]) for rubric in rated.get("rubrics") or ()]
    return [*filter(None, sentences), _uncertainty(run)] if rated else []


def _change(run: RunFiles, rated: Mapping[str, Any], rubric: str) -> str:
    models = [model for model in run.models if rated["rates"][model][rubric]["total"]]
    if not models:
        return ""
    rates = {model: rated["rates"][model][rubric] for model in (models[0], models[-1])}
    parts = [f"{short_percent(rate['rate'])} of the {rate['total']:,} decided answers of {model_phrase(model, run.used)} "
             f"(95% interval {percent_interval(rate)})" for model, rate in rates.items()]
    sentence = f"By the rubric “{rubric}”, the judge counts {joined(parts)}"
    ends = (rubric, models[-1], models[0])
    found = next((one for one in rated["differences"] if (one["rubric"], one["model"], one["against"]) == ends), None)
    if found is None:
        return f"{sentence}."
    p_value = _p(found["p"]).replace("<", "< ") if found["p"] < 0.001 else f"= {_p(found['p'])}"
    test = f"exact McNemar test over {found['pairs']:,} prompts: p {p_value}"
    return f"{sentence}, a difference {_verdict(found)} ({test})."
