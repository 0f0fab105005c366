"""The numbers at the top of the report: the first model against the last one, or all models side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxalign.tracking.differences import Estimate, difference, mean_estimate
from jaxalign.tracking.estimates import MAIN
from jaxalign.tracking.formatting import decimal, percent, percent_interval, short_percent
from jaxalign.tracking.measures import MEASURES, model_column, quantities
from jaxalign.tracking.report.blocks import Table
from jaxalign.tracking.workdir import RunFiles


@dataclasses.dataclass(frozen=True)
class Headline:
    """A headline number. `change` is "better", "worse", "no clear change", or "" if no direction is better; for a loss
    "fell", "rose" or "did not change"."""

    title: str
    before: str
    after: str
    change: str


def headlines(run: RunFiles) -> list[Headline]:
    """The first model against the last one, on each main measure; for a run without an evaluation, losses."""
    shown = []
    for name in MAIN:
        rates = rates_by_model(run, name)
        if len(rates) > 1:
            (_, first), (_, last) = rates[0], rates[-1]
            shown.append(Headline(MEASURES[name].title, short_percent(first["rate"]), short_percent(last["rate"]),
                                  change(first, last, MEASURES[name].good)))
    if run.evaluation:
        return shown
    for name, title in (("pretrain", "Pretraining loss"), ("sft", "Fine-tuning loss")):
        first, last = (run.stage(name).summary.get(field) for field in ("loss_first", "loss_last"))
        if first is not None and last is not None:
            shown.append(Headline(title, f"{first:.3f}", f"{last:.3f}", moved(first, last, 3)))
    return shown


def moved(first: float, last: float, digits: int) -> str:
    """ "rose" or "fell"; "did not change" if the numbers are equal with this many decimals."""
    if decimal(first, digits) == decimal(last, digits):
        return "did not change"
    return "rose" if last > first else "fell"


def change(first: Mapping[str, float], last: Mapping[str, float], good: bool | None) -> str:
    """The direction of a change; "no clear change" if the difference is within noise."""
    before, after = (Estimate(rate["rate"], rate["low"], rate["high"]) for rate in (first, last))
    found = difference(before, after)
    return found.side(good) if found.clear else "no clear change"


def rates_by_model(run: RunFiles, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(model, rate of the measure) for each model with a rate, in the order of the models."""
    rates = run.evaluation.get("rates") or {}
    of_models = [(model, (rates.get(model) or {}).get(name)) for model in run.models]
    return [(model, rate) for model, rate in of_models if rate and rate.get("total")]


def model_table(run: RunFiles) -> Table | None:
    """All models of a run without rates: win rates against the first model, then means, with 95% intervals; None if empty."""
    if not run.models or any((run.evaluation.get("rates") or {}).values()):
        return None
    wins = {row["model"]: row for row in run.evaluation.get("win_rates") or [] if row["against"] == run.models[0]}
    columns = []
    if wins:
        cells = {model: f"{percent(row['rate'])}\n{percent_interval(row)}" for model, row in wins.items()}
        columns.append((f"Win rate against {run.models[0]}", cells))
    values: dict[tuple[str, str], list[float]] = {}  # Those of single answers, by model and column.
    prompt_ids = set()
    for row in run.rows("evaluate"):
        prompt_ids.add(row["prompt_id"])
        for quantity in quantities(run.kl_reference):
            if row.get(quantity.column) is not None:
                values.setdefault((row["model"], quantity.column), []).append(row[quantity.column])
    for quantity in quantities(run.kl_reference):
        cells = {}
        for model, mean in (run.evaluation.get(quantity.field) or {}).items():
            if model in run.models and mean is not None:
                cells[model] = decimal(mean, quantity.digits)
                answers = values.get((model, quantity.column), ())
                if len(answers) > 1:
                    estimate = mean_estimate(mean, answers)
                    low, high = (decimal(bound, quantity.digits) for bound in (estimate.low, estimate.high))
                    cells[model] += f"\n{low} to {high}"
        columns += [(quantity.title, cells)] if cells else []
    if not columns:
        return None
    rows = [[model_column(model, run.used), *(cells.get(model, "-") for _, cells in columns)] for model in run.models]
    prompts = sum((run.evaluation.get("prompts") or {}).values()) or len(prompt_ids)
    compared = max([row["total"] for row in wins.values()], default=0)
    caption = f"All models, on the same {prompts:,} prompts" if prompts else "All models"
    caption += f"; win rates on {compared:,} of them" if compared else ""
    caption += ". Below each number is its 95% interval, if it has one."
    return Table(caption, ["Model", *(title for title, _ in columns)], rows)
