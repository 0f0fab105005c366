"""The numbers at the top of the report: the first model against the last one, or all models side by side."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from jaxalign.tracking.formatting import decimal, decimal_interval, percent, percent_interval, short_percent
from jaxalign.tracking.measures import MEASURES, Quantity, model_column, quantities
from jaxalign.tracking.report.blocks import Table
from jaxalign.tracking.workdir import RunFiles

MAIN = ("correct", "harmful", "helpful", "evasive", "courteous", "focused")
"""The measures of the headlines."""

_Z = 1.959964  # The 97.5% quantile of the normal distribution.


@dataclasses.dataclass(frozen=True)
class Headline:
    """A headline number. `change` is "better", "worse", "no clear change", or "" if no direction is better."""

    title: str
    before: str
    after: str
    change: str


def headlines(run: RunFiles) -> list[Headline]:
    """The first model against the last one, on each main measure; for a run without an evaluation, losses."""
    found = []
    for name in MAIN:
        rates = rates_by_model(run, name)
        if len(rates) > 1:
            (_, first), (_, last) = rates[0], rates[-1]
            found.append(Headline(MEASURES[name].title, short_percent(first["rate"]), short_percent(last["rate"]),
                                  change(first, last, MEASURES[name].good)))
    return found if found or run.evaluation else _losses(run)


def change(first: Mapping[str, float], last: Mapping[str, float], good: bool | None) -> str:
    """The direction of a change; "no clear change" if the 95% intervals before and after overlap."""
    if first["low"] <= last["high"] and last["low"] <= first["high"]:
        return "no clear change"
    if good is None:
        return ""
    return "better" if (last["rate"] > first["rate"]) == good else "worse"


def rates_by_model(run: RunFiles, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(model, rate of the measure) for each model with a rate, in the order of the models."""
    rates = run.evaluation.get("rates") or {}
    found = [(model, (rates.get(model) or {}).get(name)) for model in run.models]
    return [(model, rate) for model, rate in found if rate and rate.get("total")]


def model_table(run: RunFiles) -> Table | None:
    """All models of a run without rates: win rates against the first model, then means, with 95% intervals; None if empty."""
    if not run.models or any((run.evaluation.get("rates") or {}).values()):
        return None
    wins = {row["model"]: row for row in run.evaluation.get("win_rates") or [] if row["against"] == run.models[0]}
    columns = [(f"Win rate against {run.models[0]}", {model: _win_cell(row) for model, row in wins.items()})] if wins else []
    values = _values(run)
    for quantity in quantities(run.models):
        means = run.evaluation.get(quantity.field) or {}
        cells = {model: _mean_cell(means[model], values.get((model, quantity.column), []), quantity)
                 for model in run.models if means.get(model) is not None}
        columns += [(quantity.title, cells)] if cells else []
    if not columns:
        return None
    rows = [[model_column(model, run.planned), *(cells.get(model, "-") for _, cells in columns)] for model in run.models]
    prompts = sum((run.evaluation.get("prompts") or {}).values()) or len({id_ for _, id_ in _answered(run)})
    compared = max([row["total"] for row in wins.values()], default=0)
    caption = f"All models, on the same {prompts:,} prompts" if prompts else "All models"
    caption += f"; win rates on {compared:,} of them" if compared else ""
    return Table(f"{caption}. Below each number is its 95% interval.", ["Model", *(title for title, _ in columns)], rows)


def _answered(run: RunFiles) -> set[tuple[str, str]]:
    return {(row["model"], row["prompt_id"]) for row in run.rows("evaluate")}


def _values(run: RunFiles) -> dict[tuple[str, str], list[float]]:
    """The numbers of single answers, by model and field of the row."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in run.rows("evaluate"):
        for quantity in quantities(run.models):
            if row.get(quantity.column) is not None:
                found.setdefault((row["model"], quantity.column), []).append(row[quantity.column])
    return found


def _win_cell(row: Mapping[str, Any]) -> str:
    return f"{percent(row['rate'])}\n{percent_interval(row)}"


def _mean_cell(mean: float, values: list[float], quantity: Quantity) -> str:
    """A mean, and below it the interval by the normal approximation, if there are at least two answers."""
    shown = decimal(mean, quantity.digits)
    if len(values) < 2:
        return shown
    half_width = _Z * statistics.stdev(values) / math.sqrt(len(values))
    return f"{shown}\n{decimal_interval(mean, half_width, quantity.digits)}"


def _losses(run: RunFiles) -> list[Headline]:
    found = []
    for name, title in (("pretrain", "Pretraining loss"), ("sft", "Fine-tuning loss")):
        summary = run.stage(name).summary
        if summary.get("loss_first") is not None and summary.get("loss_last") is not None:
            found.append(Headline(title, f"{summary['loss_first']:.3f}", f"{summary['loss_last']:.3f}", ""))
    return found
