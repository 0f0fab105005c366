"""The basis of the plots: scales, ticks, and SVG elements with escaped text.

Plots are inline SVG rather than images from a plotting library: their colours follow the page (light or dark), their text is
readable on a phone, they take a few kilobytes, and equal data gives identical bytes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

WIDTH, HEIGHT = 320, 200  # The view box of a plot; the page scales it to its column.


def element(tag: str, content: str = "", **attributes: object) -> str:
    """An SVG element. Attribute values are escaped; `content` is markup. `class_` and `text_anchor` become `class` and
    `text-anchor`; floats are rounded to two decimals."""
    written = []
    for name, value in attributes.items():
        if value is not None:
            shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else html.escape(str(value))
            written.append(f' {name.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{tag}{''.join(written)}>{content}</{tag}>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A text element; `content` is escaped."""
    return element("text", html.escape(content), x=x, y=y, **attributes)


def hint(content: str) -> str:
    """The tooltip of an element; `content` is escaped."""
    return element("title", html.escape(content))


def svg(parts: Iterable[str], label: str, height: int = HEIGHT, width: int = WIDTH) -> str:
    """The whole drawing; `label` is its text for screen readers."""
    return element("svg", "".join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


class Scale:
    """Maps [low, high] of the data to [start, end] of the drawing. An empty interval is widened around its value."""

    def __init__(self, low: float, high: float, start: float, end: float):
        if not high > low:
            pad = abs(low) * 0.1 or 1.0
            low, high = low - pad, high + pad
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most about `count` multiples in [low, high] of a round step (1, 2 or 5 times a power of ten)."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """The label of a tick, in at most about six characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1e3:.4g}k"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def bin_means(xs: Sequence[float], ys: Sequence[float], most: int = 160) -> tuple[list[float], list[float], int]:
    """Means of consecutive points in at most `most` bins of n points each; returns (xs, ys, n).

    Points that are not finite are omitted.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    size = max(1, math.ceil(len(points) / most))
    bins = [points[start:start + size] for start in range(0, len(points), size)]
    return ([sum(x for x, _ in group) / len(group) for group in bins],
            [sum(y for _, y in group) / len(group) for group in bins], size)
