"""Plots: positions of marks, text for screen readers, and escaping."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxalign.tracking.report import plots
from jaxalign.tracking.report.plots import Interval, Series
from jaxalign.tracking.report.svg import Scale, bin_means, tick_text, ticks


def _parse(svg):
    return ElementTree.fromstring(svg)


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 100, [0, 20, 40, 60, 80, 100]), (-1.3, 2.2, [-1, 0, 1, 2]),
    (0, 59, [0, 20, 40]), (0.012, 0.013, [0.012, 0.0122, 0.0124, 0.0126, 0.0128, 0.013]), (3, 3, [3])])
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "expected"), [
    (0.0, "0"), (0.25, "0.25"), (9500, "9500"), (25000, "25k"), (2e-5, "2e-5"), (3e7, "3e7")])
def test_ticks_are_short(value, expected):
    assert tick_text(value) == expected


def test_scale_maps_ends_and_clips_values_to_the_range():
    scale = Scale(0, 10, 100, 0)
    assert [scale(0), scale(5), scale(10), scale(99)] == [100, 50, 0, 0]
    assert Scale(2, 2, 0, 1)(2) == pytest.approx(0.5)  # a flat curve is centred


def test_long_curves_are_bin_means_and_skip_non_finite_values():
    xs, ys, size = bin_means(range(6), [1.0, 3.0, float("nan"), 5.0, 7.0, float("inf")], most=2)
    assert (xs, ys, size) == ([0.5, 3.5], [2.0, 6.0], 2)


def test_line_chart_draws_every_series_and_describes_its_ends():
    drawn = plots.line_chart("KL", [Series("k1", [0, 1, 2], [0.0, 0.5, 1.5]), Series("k3", [0, 1, 2], [0.0, 0.4, 1.0])])
    root = _parse(drawn)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "KL by step: k1 from 0.00 to 1.50; k3 from 0 to 1."
    lines = root.findall("polyline")
    assert [line.get("class") for line in lines] == ["line tone-1", "line tone-2"]
    assert all(len(line.get("points").split()) == 3 for line in lines)


def test_line_chart_without_finite_points_is_empty():
    assert plots.line_chart("KL", [Series("k1", [0], [float("nan")]), Series("k3", [], [])]) == ""


def test_interval_bar_has_the_length_of_its_rate_and_a_whisker_over_the_interval():
    root = _parse(plots.interval_bars("Harmful", [Interval("base", 0.5, 0.25, 0.75, "5 of 10")]))
    bar = root.find("rect")
    start, width = float(bar.get("x")), float(bar.get("width"))
    full = [float(line.get("x1")) for line in root.findall("line") if line.get("class") == "grid"][-1] - start
    assert width == pytest.approx(full / 2, abs=0.02)
    whisker = next(line for line in root.findall("line") if line.get("class") == "whisker")
    assert float(whisker.get("x1")) == pytest.approx(start + full / 4, abs=0.02)
    assert float(whisker.get("x2")) == pytest.approx(start + 3 * full / 4, abs=0.02)
    assert root.get("aria-label") == "Harmful: base 50.0%, interval 25.0% to 75.0%."


def test_histogram_heights_follow_the_counts():
    root = _parse(plots.histogram("Confidence", [0, 0.5, 1.0], [10, 40], "P"))
    short, tall = (float(bar.get("height")) for bar in root.findall("rect"))
    assert tall == pytest.approx(4 * short, rel=0.01)
    assert [bar.find("title").text for bar in root.findall("rect")] == ["0 to 0.5: 10", "0.5 to 1: 40"]


def test_calibration_leaves_out_empty_bins_and_sizes_dots_by_count():
    edges, confidence, accuracy, count = [0.5, 0.7, 0.9, 1.0], [0.6, None, 0.95], [0.5, None, 1.0], [4.0, 0.0, 16.0]
    root = _parse(plots.calibration("Calibration", edges, confidence, accuracy, count))
    small, large = root.findall("circle")
    assert float(large.get("r")) - 2 == pytest.approx(2 * (float(small.get("r")) - 2))  # areas of 4 and 16
    assert "".join(small.itertext()) == "predicted 60.0%, observed 50.0%, 4 ordered pairs"
    assert root.get("aria-label") == "Calibration: 60.0% predicted, 50.0% observed; 95.0% predicted, 100.0% observed."


def test_time_bars_are_labelled_in_minutes():
    assert _parse(plots.time_bars("Time", [("sft", 61.0), ("ppo", 3700.0)])).get("aria-label") == \
        "Time: sft 1:01; ppo 1:01:40."


def test_hostile_labels_are_escaped_everywhere():
    evil = '"><script>alert(1)</script>'
    for drawn in (plots.line_chart(evil, [Series(evil, [0, 1], [0, 1])], x_label=evil),
                  plots.interval_bars(evil, [Interval(evil, 0.5, 0.4, 0.6, evil)]),
                  plots.histogram(evil, [0, 1], [3], evil), plots.time_bars(evil, [(evil, 1.0)])):
        _parse(drawn)
        assert "<script" not in drawn


def test_drawings_are_equal_byte_for_byte_and_load_nothing():
    def draw():
        return plots.line_chart("Loss", [Series("loss", range(500), [1 / (1 + x) for x in range(500)])])

    assert draw() == draw()
    assert not re.search(r"http|href|url\(", draw())
