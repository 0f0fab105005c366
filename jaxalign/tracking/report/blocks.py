"""The parts of the report: sections with figures and tables, and plots of the metric files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup

from jaxalign.tracking.formatting import span
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.examples import Tag
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles, StageFiles


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its caption; `legend` names the curves if there are several."""

    title: str
    svg: Markup
    note: str = ""
    legend: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header. The first cell of a row is its name. A cell may be a coloured `Tag`."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Tag]]


@dataclasses.dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
      id: its anchor; unique on the page.
      title: its heading.
      intro: a paragraph under the heading.
      missing: a sentence for each missing part, with the reason.
      figures: the plots.
      tables: the tables, below the plots.
      extra: additional plots, collapsed by default.
      body: HTML below the other parts. Texts of the run must be escaped; see `report.templating.render`.
      nav: the text of the link to the section at the top of the page; empty: the title.
      order: the sort key of sections; sections with equal keys keep the order of the stages.
    """

    id: str
    title: str
    intro: str = ""
    missing: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    extra: tuple[Figure, ...] = ()
    body: Markup = Markup("")
    nav: str = ""
    order: int = 0


FIRST, LAST = -1, 1
"""`Section.order` of the evaluation, which comes first, and of the least important sections."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """A plot of metrics: its title, and each metric's name in the legend."""

    title: str
    metrics: dict[str, str]


def curve_figures(run: RunFiles, stage: str, plan: Sequence[Curves]) -> tuple[Figure, ...]:
    """The plots of `plan` from the stage's metric file. Plots without finite values are omitted."""
    figures = []
    for curves in plan:
        series = [_series(run.stage(stage), metric, name) for metric, name in curves.metrics.items()]
        shown = [one for one in series if one.ys]
        if not shown:
            continue
        several = len(shown) > 1
        note = "; ".join(f"{one.name + ' ' if several else ''}{' → '.join(span([one.ys[0], one.ys[-1]]))}" for one in shown)
        legend = tuple(one.name for one in shown) if several else ()
        figures.append(Figure(curves.title, Markup(plots.line_chart(curves.title, shown)), note, legend))
    return tuple(figures)


def _series(stage: StageFiles, metric: str, name: str) -> Series:
    points = [(x, y) for x, y in zip(*stage.column(metric), strict=True) if math.isfinite(y)]
    return Series(name, [x for x, _ in points], [y for _, y in points])
