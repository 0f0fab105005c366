"""The plain-text table at the end of a run, with the rates of all models side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxalign.tracking.formatting import percent
from jaxalign.tracking.measures import measure, model_title, ordered_measures


def render(summary: Mapping[str, Any], stages: Collection[str] = ("pretrain", "revise")) -> str:
    """The table of an evaluation summary (`docs/data_formats.md`), without a trailing newline; "" without models.

    It has a column per model and a row per measure; each rate is followed by its count and total. Rows without any number are
    omitted; other missing numbers are shown as "-".

    Args:
        summary: the evaluation's summary.
        stages: the stages of the run, which determine the titles of models.
    """
    models = list(summary.get("models") or [])
    if not models:
        return ""
    rates = summary.get("rates") or {}
    rows = [["", *(model_title(model, stages) for model in models)]]
    for name in ordered_measures(rates):
        rows.append([measure(name).title, *(_rate((rates.get(model) or {}).get(name)) for model in models)])
    for field, title, digits in (("kl", "KL (nats per response)", 2), ("length", "Length (tokens)", 1),
                                 ("preference_score", "Preference score", 2)):
        values = summary.get(field) or {}
        if any(values.get(model) is not None for model in models):
            rows.append([title, *(_number(values.get(model), digits) for model in models)])
    lines = align(rows)
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _rate(rate: Mapping[str, Any] | None) -> str:
    if not rate or not rate.get("total"):
        return "-"
    return f"{percent(rate['rate'])} ({rate['count']}/{rate['total']})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:z.{digits}f}"


def align(rows: list[list[str]]) -> list[str]:
    """The lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
