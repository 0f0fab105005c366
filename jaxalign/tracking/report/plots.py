"""The report's plots as inline SVG. Colours are classes (`tone-0`, `tone-1`, ...) from the page's style sheet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxalign.tracking.formatting import percent, seconds, short_percent, span
from jaxalign.tracking.report.svg import HEIGHT, WIDTH, Scale, bin_means, element, hint, svg, text, tick_text, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 36
_ROW, _BAR_LEFT, _BAR_RIGHT = 40, 4, 12  # The height of a labelled bar, and the margins of the bars.
_WIDE, _LANE = 960, 48  # The width of a timeline, and the height of its rows.


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: a name and its points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Interval:
    """One bar: a rate with its 95% interval, all in [0, 1]; `note` is shown next to the rate ("9/200")."""

    label: str
    rate: float
    low: float
    high: float
    note: str
    tone: int = 0


def line_chart(title: str, series: Sequence[Series], x_label: str = "step") -> str:
    """Curves over a common x axis, in the page's tones 1, 2, ...; "" if there are no points.

    A curve without points keeps its tone, so that the tones of several plots agree. More than 160 points are drawn as means of
    bins. Points that are not finite are omitted.
    """
    curves = [(tone, one.name, *bin_means(one.xs, one.ys)) for tone, one in enumerate(series, 1)]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return ""
    all_x = [x for _, _, xs, _, _ in curves for x in xs]
    all_y = [y for _, _, _, ys, _ in curves for y in ys]
    low, high = min(all_y), max(all_y)
    pad = (high - low) * 0.06
    x = Scale(min(all_x), max(all_x), _LEFT, WIDTH - _RIGHT)
    y = Scale(low - pad, high + pad, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(x, y, x_label, whole_x=True)
    for tone, name, xs, ys, _ in curves:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        note = hint(f"{name}: {' to '.join(span([ys[0], ys[-1]]))}")
        parts.append(element("polyline", note, points=points, class_=f"line tone-{tone}"))
        parts.append(element("circle", note, cx=x(xs[-1]), cy=y(ys[-1]), r=2.6, class_=f"dot tone-{tone}"))
    spans = "; ".join(f"{name} from {' to '.join(span([ys[0], ys[-1]]))}" for _, name, _, ys, _ in curves)
    return svg(parts, f"{title} by {x_label}: {spans}.")


def interval_bars(title: str, bars: Sequence[Interval], reference: float | None = None) -> str:
    """A horizontal bar for each rate, with its 95% interval as a whisker, on an axis from 0 to 100%.

    `reference` draws a dashed line at a rate, such as 0.5 for win rates.
    """
    x = Scale(0.0, 1.0, _BAR_LEFT, WIDTH - _BAR_RIGHT)
    height = _ROW * len(bars) + 20
    parts = [element("line", x1=x(share), x2=x(share), y1=16, y2=height - 18, class_="grid")
             for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    if reference is not None:
        parts.append(element("line", x1=x(reference), x2=x(reference), y1=16, y2=height - 18, class_="reference"))
    for row, bar in enumerate(bars):
        top = row * _ROW
        middle = top + 27.0
        parts += [text(_BAR_LEFT, top + 13, bar.label),
                  text(WIDTH - _BAR_RIGHT, top + 13, f"{percent(bar.rate)}  ({bar.note})", text_anchor="end"),
                  element("rect", x=x(0.0), y=middle - 8, width=x(bar.rate) - x(0.0), height=16,
                          class_=f"bar tone-{bar.tone}")]
        start, end = x(bar.low), x(bar.high)
        strokes = [(start, end, middle, middle), (start, start, middle - 5, middle + 5), (end, end, middle - 5, middle + 5)]
        parts += [element("line", x1=a, x2=b, y1=c, y2=d, class_="whisker") for a, b, c, d in strokes]
    anchors = {0.0: "start", 0.25: "middle", 0.5: "middle", 0.75: "middle", 1.0: "end"}
    parts += [text(x(share), height - 4, short_percent(share), class_="tick", text_anchor=anchor)
              for share, anchor in anchors.items()]
    spoken = "; ".join(f"{bar.label} {percent(bar.rate)}, interval {percent(bar.low)} to {percent(bar.high)}"
                       for bar in bars)
    return svg(parts, f"{title}: {spoken}.", height)


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], x_label: str) -> str:
    """Counts in bins: len(edges) == len(counts) + 1."""
    x = Scale(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT)
    y = Scale(0.0, max([*counts, 1]) * 1.05, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(x, y, x_label)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        note = hint(f"{low:.3g} to {high:.3g}: {count:,}")
        parts.append(element("rect", note, x=x(low) + 0.5, y=y(count), width=max(x(high) - x(low) - 1, 0.5),
                             height=y(0.0) - y(count), class_="bar tone-1"))
    return svg(parts, f"{title}: {sum(counts):,} in {len(counts)} bins from {edges[0]:.3g} to {edges[-1]:.3g}.")


def calibration(title: str, edges: Sequence[float], confidence: Sequence[float | None],
                accuracy: Sequence[float | None], count: Sequence[float]) -> str:
    """Observed frequency against predicted probability, by bin. The dashed diagonal marks perfect calibration.

    `count` counts ordered pairs: each pair once in each order of its answers.

    The size of a dot grows with its bin's count. Empty bins (count 0 or None) are omitted.
    """
    x = Scale(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT)
    bins = [(a, b, n) for a, b, n in zip(confidence, accuracy, count, strict=True)
            if n and a is not None and b is not None]
    y = Scale(min([x.low, *(b for _, b, _ in bins)]), 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(x, y, "predicted probability")
    parts.append(element("line", x1=x(x.low), y1=y(x.low), x2=x(x.high), y2=y(x.high), class_="reference"))
    largest = max([n for _, _, n in bins], default=1)
    parts.append(element("polyline", points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b, _ in bins),
                         class_="line tone-1"))
    for a, b, n in bins:
        note = hint(f"predicted {percent(a)}, observed {percent(b)}, {n:,.0f} ordered pair{'s' * (n != 1)}")
        parts.append(element("circle", note, cx=x(a), cy=y(b), r=2.0 + 6.0 * (n / largest) ** 0.5, class_="dot tone-1"))
    spoken = "; ".join(f"{percent(a)} predicted, {percent(b)} observed" for a, b, _ in bins)
    return svg(parts, f"{title}: {spoken or 'no pairs'}.")


def time_bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """A horizontal bar for each (label, seconds)."""
    x = Scale(0.0, max([spent for _, spent in rows] + [1e-9]), _BAR_LEFT, WIDTH - _BAR_RIGHT)
    parts = []
    for row, (label, spent) in enumerate(rows):
        top = row * 32
        parts += [text(_BAR_LEFT, top + 13, label),
                  text(WIDTH - _BAR_RIGHT, top + 13, seconds(spent), text_anchor="end"),
                  element("rect", x=x(0.0), y=top + 18, width=max(x(spent) - x(0.0), 1.0), height=8,
                          class_="bar tone-1")]
    spoken = "; ".join(f"{label} {seconds(spent)}" for label, spent in rows)
    return svg(parts, f"{title}: {spoken}.", 32 * len(rows) + 2)


@dataclasses.dataclass(frozen=True)
class Lane:
    """A row of a timeline: its label, and its bars as (name, start, end)."""

    label: str
    bars: Sequence[tuple[str, float, float]]


def timeline(title: str, lanes: Sequence[Lane], names: Sequence[str], marks: Sequence[tuple[float, str]], end: float) -> str:
    """Bars over time, in a row for each lane; the empty part of a row is grey.

    Args:
      title: the title, for screen readers.
      lanes: the rows. Bars of one row do not overlap.
      names: the names of all bars, in the page's tones 1, 2, ...
      marks: times at which something begins, in seconds, with texts.
      end: the end of the axis, which begins at 0, in seconds.
    """
    x, bottom = Scale(0.0, end, _BAR_LEFT, _WIDE - _BAR_RIGHT), 22 + _LANE * len(lanes)
    parts = []
    for row, lane in enumerate(lanes):
        top = 22 + row * _LANE
        parts += [text(_BAR_LEFT, top + 14, lane.label),
                  element("rect", x=x(0.0), y=top + 20, width=x(end) - x(0.0), height=22, class_="track")]
        for name, began, ended in lane.bars:
            width = max(x(ended) - x(began), 0.8)
            note = hint(f"{name}: {ended - began:.3g} s, from {began:.3g} to {ended:.3g} s")
            tone = names.index(name) + 1
            parts.append(element("rect", note, x=x(began), y=top + 20, width=width, height=22, class_=f"bar tone-{tone}"))
            if width > 6.2 * len(name) + 8:
                parts.append(text(x(began) + width / 2, top + 35, name, class_="within", text_anchor="middle"))
    tracks = [(38 + row * _LANE, 68 + row * _LANE) for row in range(len(lanes))]
    for at, label in marks:
        parts.append(text(x(at) + 5, 13, label, class_="tick"))
        parts += [element("line", x1=x(at), x2=x(at), y1=above, y2=below, class_="axis") for above, below in [(3, 16), *tracks]]
    parts += [text(x(value), bottom + 16, f"{tick_text(value)} s", class_="tick", text_anchor="middle" if value else "start")
              for value in ticks(0.0, end, 8)]
    spoken = "; ".join(f"{lane.label}: " + ", ".join(f"{name} {ended - began:.3g} s" for name, began, ended in lane.bars)
                       for lane in lanes)
    return svg(parts, f"{title}. {spoken}.", bottom + 20, _WIDE)


def _axes(x: Scale, y: Scale, x_label: str, whole_x: bool = False) -> list[str]:
    bottom = y.start
    parts = []
    for value in ticks(y.low, y.high, 4):
        parts += [element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"),
                  text(x.start - 6, y(value) + 3.5, tick_text(value), class_="tick", text_anchor="end")]
    marks = ticks(x.low, x.high, 5)
    for value in [mark for mark in marks if mark == round(mark)] if whole_x else marks:
        parts.append(text(x(value), bottom + 14, tick_text(value), class_="tick", text_anchor="middle"))
    parts.append(element("line", x1=x.start, x2=x.end, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text((x.start + x.end) / 2, bottom + 29, x_label, class_="tick", text_anchor="middle"))
    return parts
