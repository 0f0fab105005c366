"""The figure of the over-optimisation study as SVG: one panel per method and proxy size."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from overoptimization_fit import curve

from jaxalign.tracking.report.svg import Scale, element, text, tick_text, ticks

METHODS = (("best_of_n", "best of n"), ("rl", "RL"))
PANEL, PANEL_HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 270, 190, 62, 74, 34, 66
# Colours for light and dark pages. The figure is used in an <img>, so it contains its own style.
STYLE = """
svg { --page: #ffffff; --ink: #1c1b19; --soft: #5b5852; --rule: #dedad2;
  --tone-0: #2563eb; --tone-1: #c2570c; --tone-2: #15803d; }
@media (prefers-color-scheme: dark) { svg { --page: #161513; --ink: #ece9e3; --soft: #aaa69d; --rule: #3a3833;
  --tone-0: #6ea8fe; --tone-1: #fb9a4b; --tone-2: #5fd08a; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.tick { font-size: 11px; fill: var(--soft); } .title { font-weight: 600; }
.page { fill: var(--page); } .grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.proxy { stroke-dasharray: 6 4; stroke-width: 1.5; } .fit { stroke-width: 1; opacity: .75; }
.tone-0 { stroke: var(--tone-0); } .tone-1 { stroke: var(--tone-1); } .tone-2 { stroke: var(--tone-2); }
circle { stroke: none; } circle.tone-0 { fill: var(--tone-0); } circle.tone-1 { fill: var(--tone-1); }
circle.tone-2 { fill: var(--tone-2); } .key { stroke: var(--ink); fill: var(--ink); } line.key { stroke-width: 1.8; }
"""


def plot(results: Sequence[dict]) -> str:
    """Return a complete SVG file. results: size, pairs, and for both methods rows (kl, proxy, gold) and the fit."""
    sizes, pairs = (list(dict.fromkeys(result[name] for result in results)) for name in ("size", "pairs"))
    width = LEFT + len(sizes) * (PANEL + GAP_X)
    height = TOP + len(METHODS) * (PANEL_HEIGHT + GAP_Y)
    parts = [element("style", STYLE), element("rect", width=width, height=height, class_="page"), *_legend(pairs)]
    for row, (method, title) in enumerate(METHODS):
        rows = [point for result in results for point in result[method]]
        x_high = max(max(_distance(point) for point in rows), 1e-6)
        scores = [point[name] for point in rows for name in ("proxy", "gold")]
        pad = 0.05 * (max(scores) - min(scores))
        top = TOP + row * (PANEL_HEIGHT + GAP_Y)
        for column, size in enumerate(sizes):
            left = LEFT + column * (PANEL + GAP_X)
            x = Scale(0.0, x_high, left, left + PANEL)
            y = Scale(min(scores) - pad, max(scores) + pad, top + PANEL_HEIGHT, top)
            shown = [result for result in results if result["size"] == size]
            parts.append(text(left, top - 8, f"{title}, proxy of {shown[0]['parameters']:,} parameters", class_="title"))
            parts += _axes(x, y, first=column == 0)
            for result in shown:
                parts += _curves(x, y, method, result, pairs.index(result["pairs"]))
    label = "Gold and proxy score by distance from the start. " + " ".join(_spoken(result) for result in results)
    return element(
        "svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width, role="img",
        aria_label=html.unescape(label),
    ) + "\n"


def _distance(point: dict) -> float:
    return max(point["kl"], 0.0) ** 0.5


def _curves(x: Scale, y: Scale, method: str, result: dict, tone: int) -> list[str]:
    distance = [_distance(point) for point in result[method]]
    gold, proxy = ([point[name] for point in result[method]] for name in ("gold", "proxy"))
    found = result["fits"][method]
    grid = np.linspace(0, max(distance), 80)
    # Cut a fit where it leaves the panel instead of drawing it along the edge.
    inside = [(a, b) for a, b in zip(grid, curve(grid, found["alpha"], found["beta"], method), strict=True)
              if y.low <= b <= y.high]
    dots = [element("circle", cx=x(a), cy=y(b), r=2.4, class_=f"tone-{tone}") for a, b in zip(distance, gold, strict=True)]
    return [
        _line(x, y, zip(distance, proxy, strict=True), f"proxy tone-{tone}"),
        _line(x, y, inside, f"fit tone-{tone}"),
        *dots,
    ]


def _line(x: Scale, y: Scale, points, class_: str) -> str:
    return element("polyline", points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points), class_=class_)


def _axes(x: Scale, y: Scale, first: bool) -> list[str]:
    parts = []
    for value in ticks(y.low, y.high, 5):
        kind = "axis" if value == 0 else "grid"
        parts.append(element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_=kind))
        parts.append(text(x.start - 6, y(value) + 4, tick_text(value), class_="tick", text_anchor="end"))
    for value in ticks(x.low, x.high, 5):
        parts.append(text(x(value), y.start + 15, tick_text(value), class_="tick", text_anchor="middle"))
    middle, centre = (x.start + x.end) / 2, (y.start + y.end) / 2
    parts.append(text(middle, y.start + 32, "d = √KL from the start, √nats", class_="tick", text_anchor="middle"))
    if first:
        turned = f"rotate(-90 {x.start - 44} {centre})"
        parts.append(text(x.start - 44, centre, "score, standard deviations", class_="tick", text_anchor="middle",
                          transform=turned))
    return parts


def _legend(pairs: Sequence[int]) -> list[str]:
    parts, left = [], LEFT
    for tone, number in enumerate(pairs):
        parts += [element("line", x1=left, x2=left + 26, y1=16, y2=16, class_=f"tone-{tone}", stroke_width=3),
                  text(left + 32, 20, f"{number:,} comparisons")]
        left += 150
    parts += [
        element("circle", cx=LEFT + 13, cy=38, r=2.8, class_="key"),
        text(LEFT + 32, 42, "gold"),
        element("line", x1=LEFT + 82, x2=LEFT + 112, y1=38, y2=38, class_="key fit"),
        text(LEFT + 118, 42, "fit of gold"),
        element("line", x1=LEFT + 200, x2=LEFT + 230, y1=38, y2=38, class_="key proxy"),
        text(LEFT + 236, 42, "proxy (optimised)"),
    ]
    return parts


def _spoken(result: dict) -> str:
    sentences = []
    for method, title in METHODS:
        best, last = max(result[method], key=lambda point: point["gold"]), result[method][-1]
        sentences.append(
            f"{title} gold {best['gold']:.2f} at {_distance(best):.1f}, {last['gold']:.2f} at {_distance(last):.1f}, "
            f"proxy {last['proxy']:.2f}")
    return f"{result['size']} on {result['pairs']}: {'; '.join(sentences)}."
