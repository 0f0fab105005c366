"""The plain-text table at the end of a run, with the rates of all models side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxalign.tracking.formatting import decimal, percent, percent_interval
from jaxalign.tracking.measures import measure, model_column, ordered_measures, quantities


def render(
    summary: Mapping[str, Any], stages: Collection[str] = ("pretrain", "revise"), reference: str = "base",
) -> str:
    """The table of an evaluation summary (`docs/data_formats.md`), without a trailing newline; "" without models.

    It has a column per model and a row per measure; each rate is followed by its count and total, and each win
    rate by its 95% interval. Rows without any number are omitted; other missing numbers are shown as "-".

    Args:
        summary: the evaluation's summary.
        stages: the stages whose output the run used, which determine the titles of models.
        reference: the model that the KL is measured against.
    """
    models = list(summary.get("models") or [])
    if not models:
        return ""
    rates = summary.get("rates") or {}
    rows = [["", *(model_column(model, stages) for model in models)]]
    for name in ordered_measures(rates):
        of_models = [(rates.get(model) or {}).get(name) or {} for model in models]
        cells = [f"{percent(rate['rate'])} ({rate['count']}/{rate['total']})" if rate.get("total") else "-"
                 for rate in of_models]
        rows.append([measure(name).title, *cells])
    rows += _rubric_rates(summary.get("rubrics") or {}, models)
    rows += _win_rates(summary.get("win_rates") or [], models)
    for quantity in quantities(reference):
        values = summary.get(quantity.field) or {}
        if any(values.get(model) is not None for model in models):
            rows.append([quantity.title, *(decimal(values.get(model), quantity.digits) for model in models)])
    return "\n".join(ruled(rows))


def _rubric_rates(rated: Mapping[str, Any], models: Sequence[str]) -> list[list[str]]:
    """A row with the decided answers that the judge counts by each rubric, and their 95% interval."""
    rows = []
    for rubric in rated.get("rubrics") or []:
        rates = [rated["rates"][model][rubric["name"]] for model in models]
        cells = [f"{percent(rate['rate'])} ({percent_interval(rate)})" if rate["total"] else "-" for rate in rates]
        rows.append([f"{rubric['name']}, by the judge (95% interval)", *cells])
    return rows


def _win_rates(compared: Sequence[Mapping[str, Any]], models: Sequence[str]) -> list[list[str]]:
    """A row with every model's win rate against the first model, and its 95% interval; no row if none was compared."""
    against = {row["model"]: row for row in compared if row["against"] == models[0] and row.get("total")}
    if not against:
        return []
    cells = [f"{percent(against[model]['rate'])} ({percent_interval(against[model])})" if model in against else "-"
             for model in models]
    total = max(row["total"] for row in against.values())
    return [[f"Win rate against {models[0]}, n={total:,} (95% interval)", *cells]]


def ruled(rows: list[list[str]]) -> list[str]:
    """`align`, with a line below the first row."""
    lines = align(rows)
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def align(rows: list[list[str]]) -> list[str]:
    """The lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
