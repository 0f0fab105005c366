"""The parts of the report: sections with figures and tables, and plots of the metric files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from jaxalign.tracking.formatting import span
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.examples import Tag
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its caption; `legend` names the curves or bars if there are several. `wide`: as wide as the page."""

    title: str
    svg: Markup
    note: str = ""
    legend: tuple[str, ...] = ()
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header. The first cell of a row is its name. A cell may be a coloured `Tag`."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Tag]]


@dataclasses.dataclass(frozen=True)
class ReportSection:
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

    @property
    def filled(self) -> bool:
        """Whether the section has more than sentences about missing parts; only then a link leads to it."""
        return bool(self.intro or self.figures or self.tables or self.extra or self.body)


FIRST, LAST = -1, 1
"""`ReportSection.order` of the evaluation, which comes first, and of the least important sections."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """A plot of metrics: its title, and each metric's name in the legend."""

    title: str
    metrics: dict[str, str]


def curve_figures(run: RunFiles, stage: str, plan: Sequence[Curves]) -> tuple[Figure, ...]:
    """The plots of `plan` from the stage's metric file. Plots without finite values are omitted."""
    figures = []
    for curves in plan:
        columns = {name: run.stage(stage).column(metric) for metric, name in curves.metrics.items()}
        points = {name: list(zip(*column, strict=True)) for name, column in columns.items()}
        figures += curve_figure(curves.title, points)
    return tuple(figures)


def curve_figure(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], x_label: str = "step") -> list[Figure]:
    """A plot of the finite points (x, y) of each curve, by name, with their first and last values; none without such points."""
    series = []
    for name, points in curves.items():
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        if finite:
            series.append(Series(name, [x for x, _ in finite], [y for _, y in finite]))
    if not series:
        return []
    several = len(series) > 1
    note = "; ".join(f"{one.name + ' ' if several else ''}{' → '.join(span([one.ys[0], one.ys[-1]]))}" for one in series)
    legend = tuple(one.name for one in series) if several else ()
    return [Figure(title, Markup(plots.line_chart(title, series, x_label)), note, legend)]
