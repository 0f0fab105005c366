"""What the report's sections of numbers are made of: figures and tables, and curves read from the metric files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup

from jaxalign.tracking.report import plots
from jaxalign.tracking.report.examples import Tag
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles, StageFiles


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its caption; `legend` names the curves where there are several."""

    title: str
    svg: Markup
    note: str = ""
    legend: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first cell of a row is its name. A cell may be a `Tag` to be coloured."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Tag]]


@dataclasses.dataclass(frozen=True)
class Section:
    """One section of numbers; `missing` says in a sentence what is not there and why, `extra` is folded away."""

    id: str
    title: str
    intro: str = ""
    missing: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    extra: tuple[Figure, ...] = ()


@dataclasses.dataclass(frozen=True)
class Curves:
    """One plot to be: its title, and each metric drawn in it with the name it has in the legend."""

    title: str
    metrics: dict[str, str]


def curve_figures(run: RunFiles, stage: str, plan: Sequence[Curves]) -> tuple[Figure, ...]:
    """The plots of `plan` over the stage's metric file; those without a single finite value are left out."""
    figures = []
    for curves in plan:
        series = [_series(run.stage(stage), metric, name) for metric, name in curves.metrics.items()]
        shown = [one for one in series if one.ys]
        if not shown:
            continue
        several = len(shown) > 1
        note = "; ".join(f"{one.name + ' ' if several else ''}{one.ys[0]:.3g} → {one.ys[-1]:.3g}" for one in shown)
        legend = tuple(one.name for one in shown) if several else ()
        figures.append(Figure(curves.title, Markup(plots.line_chart(curves.title, shown)), note, legend))
    return tuple(figures)


def _series(stage: StageFiles, metric: str, name: str) -> Series:
    points = [(x, y) for x, y in zip(*stage.column(metric), strict=True) if math.isfinite(y)]
    return Series(name, [x for x, _ in points], [y for _, y in points])
