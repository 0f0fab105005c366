"""Wilson's interval against published figures and against the equation that it solves; the other statistics by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.algorithms.statistics import (
    bootstrap_interval,
    cohen_kappa,
    logistic_coefficients,
    mcnemar,
    paired_difference,
    pearson,
    spearman,
    wilson_interval,
)


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


# Two readers of 50 proposals: both yes 20, only the first 5, only the second 10, neither 15. Observed agreement 0.7, by chance
# 0.5 * 0.6 + 0.5 * 0.4 = 0.5, so kappa is 0.2 / 0.5.
def test_kappa_of_two_readers():
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa(second, first) == pytest.approx(0.4)


def test_kappa_is_0_for_a_constant_rater_and_1_for_complete_agreement():
    assert cohen_kappa("aaaa", "abab") == 0.0
    assert cohen_kappa("abca", "abca") == 1.0
    assert cohen_kappa("aaa", "aaa") is None and cohen_kappa("", "") is None


def test_the_bootstrap_interval_of_a_mean_is_close_to_the_normal_one():
    values = np.arange(400) % 2
    low, high = bootstrap_interval(lambda rows: float(values[rows].mean()), 400, seed=1, resamples=2000)
    half = 1.96 * math.sqrt(0.25 / 400)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.005)
    assert (low, high) == bootstrap_interval(lambda rows: float(values[rows].mean()), 400, seed=1, resamples=2000)


def test_an_undefined_statistic_has_no_interval():
    assert bootstrap_interval(lambda rows: None, 10) is None and bootstrap_interval(lambda rows: 1.0, 0) is None


def test_maximum_likelihood_of_two_patterns_fits_their_shares():
    """Pattern (1, 1) is positive in 3 of 4 cases, so a + b = log 3; pattern (-1, 1) in 1 of 2, so b - a = 0."""
    features = [(1, 1)] * 4 + [(-1, 1)] * 2
    found = logistic_coefficients(features, [1, 1, 1, 0, 1, 0], scale=math.inf)
    np.testing.assert_allclose(found, [math.log(3) / 2] * 2, atol=1e-9)


def test_logistic_coefficients_minimise_the_penalised_loss():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 2)) * [3, 1]
    outcome = rng.choice([0, 0.5, 1], size=40)
    outcome[:20] = features[:20, 0] > 0

    def loss(b):
        p = 1 / (1 + np.exp(-features @ b))
        return -np.sum(outcome * np.log(p) + (1 - outcome) * np.log(1 - p)) + b @ b / (2 * 2.5**2)

    expected = scipy.optimize.minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x
    np.testing.assert_allclose(logistic_coefficients(features, outcome), expected, atol=1e-5)


def test_a_feature_that_predicts_every_outcome_has_a_finite_coefficient():
    found = logistic_coefficients([(40.0, 0), (-30.0, 0), (0.5, 0)], [1, 0, 1])
    assert np.isfinite(found).all() and found[0] > 0 and found[1] == 0


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 5), (6, 6), (86, 150), (7, 3)])
def test_mcnemar_is_the_two_sided_binomial_test_of_the_pairs_that_differ(gained, lost):
    expected = scipy.stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_paired_difference_is_the_published_one():
    # Agresti, Categorical Data Analysis, table 10.1: approval of the prime minister, 1,600 people, 86 gained and 150 lost.
    assert paired_difference(86, 150, 1600) == pytest.approx((-0.059, -0.021), abs=5e-4)
    low, high = paired_difference(0, 0, 3)  # By hand: 0 +- 1.96 * sqrt(1 / 5) / sqrt(5)
    assert (low, high) == pytest.approx((-0.392, 0.392), abs=1e-3)
    assert paired_difference(2, 0, 2)[1] == 1.0
