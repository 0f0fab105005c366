"""Wilson's interval against published figures and against the equation that it solves; correlations by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.algorithms.statistics import pearson, spearman, wilson_interval


# Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
@pytest.mark.parametrize(
    "count, total, low, high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_equal_published_figures(count, total, low, high):
    assert wilson_interval(count, total) == pytest.approx((low, high), abs=5.1e-5)


@given(total=st.integers(1, 5000), share=st.floats(0, 1), confidence=st.sampled_from([0.8, 0.95, 0.99]))
def test_the_ends_are_where_the_score_test_starts_to_reject(total, share, confidence):
    count = round(share * total)
    z = {0.8: 1.2815515655, 0.95: 1.9599639845, 0.99: 2.5758293035}[confidence]
    low, high = wilson_interval(count, total, confidence)
    assert 0 <= low <= count / total <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(count / total - end) == pytest.approx(z * math.sqrt(end * (1 - end) / total), rel=1e-6, abs=1e-9)


def test_the_interval_of_no_observations_is_0_to_1():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_ends_are_exact():
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0


@pytest.mark.parametrize("count, total", [(-1, 5), (6, 5), (1, 0), (float("nan"), 5)])
def test_impossible_counts_are_refused(count, total):
    with pytest.raises(ValueError, match="count is"):
        wilson_interval(count, total)


def test_an_impossible_confidence_is_refused():
    with pytest.raises(ValueError, match="confidence is 95; a number between 0 and 1"):
        wilson_interval(1, 2, confidence=95)


def test_correlations_by_hand():
    """Deviations of x: -2 -1 0 1 2; of y: -1 -2 1 0 2. Products sum to 8, over 10. The ranks equal the values."""
    x, y = [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]
    assert pearson(x, y) == pytest.approx(0.8) and spearman(x, y) == pytest.approx(0.8)
    assert spearman(x, [1, 10, 100, 1e4, 1e9]) == pytest.approx(1) and pearson(x, [1, 10, 100, 1e4, 1e9]) < 0.8
    assert pearson(x, [-7, -9, -11, -13, -15]) == pytest.approx(-1)


def test_ties_share_their_mean_rank():
    """Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: products of deviations 2.25 + 0 + 0 + 2.25, over sqrt(4.5 * 5)."""
    assert spearman([0, 5, 5, 9], [3, 4, 5, 6]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_constant_values_have_no_correlation():
    assert pearson([1, 1, 1], [1, 2, 3]) is None and spearman([1], [2]) is None
    with pytest.raises(ValueError, match="two arrays"):
        pearson([1, 2], [1, 2, 3])
