"""The sections of stage evaluate: rates, win rates, results of lm-evaluation-harness and answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jaxalign.reasons import without_verdict
from jaxalign.tracking.formatting import capitalized, decimal, number, percent, rate_cell
from jaxalign.tracking.measures import (
    measure,
    model_column,
    model_phrase,
    model_title,
    ordered_measures,
    quantities,
)
from jaxalign.tracking.report import examples, paired, plots
from jaxalign.tracking.report.blocks import FIRST, Figure, ReportSection, Table
from jaxalign.tracking.report.plots import Interval
from jaxalign.tracking.report.prose import no_rates
from jaxalign.tracking.report.roles import judge_phrase
from jaxalign.tracking.report.rubrics import rubric_rates
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_MISTAKES, _EXAMPLES = 6, 12
_VALUE = 60  # Characters shown of a column's value.


def evaluation(run: RunFiles) -> list[ReportSection]:
    """The models' rates, the rates by rubrics, tasks of lm-eval, the judge's preferences, results by column, and sample
    answers, as far as they are available."""
    if not run.evaluation and not any(run.rows("evaluate")):
        missing = run.absence("evaluate", "the rates of each model")
        return [ReportSection("behaviour", _BEHAVIOUR, missing=(missing,), nav="Rates", order=FIRST)]
    return [behaviour(run), *rubric_rates(run), *harness_results(run), *win_rates(run), *by_column(run), *answers(run)]


_BEHAVIOUR = "How the models behave"


def behaviour(run: RunFiles) -> ReportSection:
    """The rates of each model with intervals, then KL, length and score."""
    evaluation, figures, rows = run.evaluation, [], []
    for name in ordered_measures(evaluation.get("rates") or {}):
        about = measure(name)
        rates = [((evaluation.get("rates") or {}).get(model) or {}).get(name) or {} for model in run.models]
        bars = [Interval(model_title(model, run.used), rate["rate"], rate["low"], rate["high"],
                         f"{rate['count']:,} of {rate['total']:,}", tone)
                for tone, (model, rate) in enumerate(zip(run.models, rates, strict=True)) if rate.get("total")]
        if bars:
            side = {True: "Higher is better", False: "Lower is better"}.get(about.good, "")
            caption = ": ".join(part for part in (side, about.meaning) if part)
            figures.append(Figure(about.title, Markup(plots.interval_bars(about.title, bars)), caption))
        rows.append([about.title, *map(rate_cell, rates)])
    for quantity in quantities(run.kl_reference):
        values = [(evaluation.get(quantity.field) or {}).get(model) for model in run.models]
        if any(value is not None for value in values):
            rows.append([quantity.title, *(decimal(value, quantity.digits) for value in values)])
    rows += paired.distinct_rows(run)
    header = ["Measure", *(model_column(model, run.used) for model in run.models)]
    captions = ["Rates with 95% Wilson intervals."] if figures else []
    captions += [f"KL is measured against {model_phrase(run.kl_reference, run.used)}."] if evaluation.get("kl") else []
    prompts = sum((evaluation.get("prompts") or {}).values())
    intro = f"Each model answered the same {prompts:,} prompts. " if prompts else ""
    if figures:
        intro += "Bars show rates; whiskers show their 95% intervals."
    tables = [Table(" ".join(captions), header, rows)] if rows else []
    return ReportSection(
        "behaviour", _BEHAVIOUR, intro, () if figures else (no_rates(run),), tuple(figures),
        (*tables, *paired.choice_tables(run), *paired.difference_tables(run)), nav="Rates", order=FIRST,
    )


def win_rates(run: RunFiles) -> list[ReportSection]:
    """How often the judge preferred one model's answers over another's; no section if it compared none."""
    compared = [row for row in run.evaluation.get("win_rates") or [] if row.get("total")]
    figures = []
    for row in compared:
        name = f"{model_title(row['model'], run.used)} against {model_title(row['against'], run.used)}"
        note = f"{number(row['wins'])} of {row['total']:,}"
        bar = Interval("preferred", row["rate"], row["low"], row["high"], note, 1)
        undecided, unread = row.get("undecided"), sum(without_verdict(row.get("outcomes") or {}).values())
        unread = f", {unread:,} of them without a verdict" if unread else ""
        ties = "" if undecided is None else f"{number(undecided)} undecided{unread}, each counted as half a win."
        ties = " ".join(filter(None, (ties, paired.draw_note(row))))
        figures.append(Figure(capitalized(name), Markup(plots.interval_bars(name, [bar], reference=0.5)), ties))
    intro = (f"{capitalized(judge_phrase(run, 'evaluate'))} compared the answers to each prompt, in both orders. The dashed "
             "line marks a draw; whiskers show 95% intervals.")
    intro = " ".join([intro, *paired.length_sentences(run, compared)])
    title = "Which answers the judge prefers"
    if not compared:
        return []
    tables = paired.win_rate_tables(run, compared)
    return [ReportSection("wins", title, intro, figures=tuple(figures), tables=tables, nav="Win rates", order=FIRST)]


def by_column(run: RunFiles) -> list[ReportSection]:
    """A table for each column of the prompts by which the results are broken down; no section if there is none."""
    header = [model_title(model, run.used) for model in run.models]
    tables = [Table(f"The column “{column}” of the prompts.", [column, "Prompts", "Measure", *header],
                    [row for value, results in values.items() for row in _value_rows(run, value, results)])
              for column, values in (run.evaluation.get("by_column") or {}).items()]
    intro = "The results for the prompts of each value of a column. Rates of preference have 95% intervals."
    title = "Results by column of the prompts"
    return [ReportSection("columns", title, intro, tables=tuple(tables), nav="By column", order=FIRST)] if tables else []


def _value_rows(run: RunFiles, value: str, results: Mapping[str, Any]) -> list[list[str]]:
    """The rows of a table on the prompts with one value of a column: the measures, and the preferences over each model."""
    first = [value[:_VALUE] or "(empty)", number(results.get("prompts"))]
    rows = []
    decimals = {quantity.field: functools.partial(decimal, digits=quantity.digits) for quantity in quantities(run.kl_reference)}
    for field, label, shown in (("length", "Length, tokens", decimals["length"]), ("complete", "Complete answers", percent),
                                ("preference_score", "Preference score before normalisation", decimals["preference_score"])):
        means = results.get(field) or {}
        if means:
            rows.append([*first, label, *(shown(means.get(model)) for model in run.models)])
    wins = {(row["model"], row["against"]): row | {"count": row["wins"]} for row in results.get("win_rates") or []}
    for against in run.models:
        if any(earlier == against for _, earlier in wins):
            label = f"Preferred over {model_phrase(against, run.used)}"
            rows.append([*first, label, *(rate_cell(wins.get((model, against))) for model in run.models)])
    return rows


def answers(run: RunFiles) -> list[ReportSection]:
    """The first prompts of each kind with every model's answer, and the last model's first faulty answers."""
    rows = list(run.rows("evaluate"))
    if not rows:
        return []
    configured = (run.config.get("evaluate") or {}).get("examples")
    models = list(run.models or dict.fromkeys(row["model"] for row in rows))
    kinds = dict.fromkeys(row.get("kind") for row in rows)
    each = math.ceil((_EXAMPLES if configured is None else configured) / max(len(kinds), 1))
    groups = examples.answered_prompts(rows, models, each)
    judged = any(row.get("gold") for row in rows)
    if not any(groups.values()) and not judged:
        return []
    body = render(
        "answers.html.j2",
        models=[model_title(model, run.used) for model in models],
        last=model_phrase(models[-1], run.used),
        groups=[(examples.KIND_TITLES.get(kind or "", (kind or "prompts").replace("_", " ").capitalize()), prompts)
                for kind, prompts in groups.items()],
        chosen=_chosen([len(prompts) for prompts in groups.values()], each),
        mistakes=examples.mistakes(rows, models[-1], _MISTAKES),
        judged=judged,
        verified=any("correct" in (row.get("gold") or {}) for row in rows),
    )
    return [ReportSection("answers", "The same prompts answered by each model", body=body, nav="Answers", order=FIRST)]


def _chosen(numbers: Sequence[int], each: int) -> str:
    """Which prompts are shown. numbers: the number of them of each kind; each: the maximum of it."""
    if max(numbers, default=0) < each:
        return f"All {sum(numbers)} prompts, in the order of the data" if sum(numbers) > 1 else "The only prompt"
    first = f"The first {each} prompts" if each > 1 else "The first prompt"
    return first + (" of each kind" if len(numbers) > 1 else "") + ", in the order of the data (not hand-picked)"


def harness_results(run: RunFiles) -> list[ReportSection]:
    """A table with a row for each metric of each task, and a column for each model; no section without tasks."""
    results = run.evaluation.get("lm_eval") or {}
    tasks: dict[str, Mapping[str, Any]] = {}
    for by_task in results.values():
        tasks |= {task: result for task, result in by_task.items() if task not in tasks}
    if not tasks:
        return []
    rows = []
    for task, about in tasks.items():
        for metric in about["metrics"]:
            cells = [_harness_cell((by_task.get(task) or {}).get("metrics", {}).get(metric) or {})
                     for by_task in results.values()]
            rows.append([task, metric, number(about["documents"]), number(about["shots"]), *cells])
    header = ["Task", "Metric", "Documents", "Examples in the prompt", *(model_title(model, run.used) for model in results)]
    intro = "Tasks of lm-evaluation-harness. After ± is the standard error, where it is known."
    return [ReportSection("lm-eval", "Tasks of lm-evaluation-harness", intro, tables=(Table("", header, rows),), nav="lm-eval",
                          order=FIRST)]


def _harness_cell(metric: Mapping[str, Any]) -> str:
    value, error = metric.get("value"), metric.get("stderr")
    if value is None:
        return "-"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
