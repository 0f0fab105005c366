"""Win rates at equal lengths against scikit-learn and a simulated judge; intervals against hand calculations."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from sklearn.linear_model import LogisticRegression

from jaxalign.algorithms.statistics import logistic_coefficients
from jaxalign.algorithms.win_rates import mean_difference, paired_rates


def judged(count, theta, phi, longer, seed=0):
    """(outcomes, length differences) of a simulated judge that follows the model; the differences have the mean `longer`."""
    rng = np.random.default_rng(seed)
    differences = np.round(rng.normal(longer, 100, count))
    chance = 1 / (1 + np.exp(-theta - phi * np.tanh(differences / differences.std(ddof=1))))
    return (rng.random(count) < chance).astype(float), differences


def test_the_rate_at_equal_lengths_is_that_of_scikit_learn():
    """Ties are one win and one loss of half a weight. Without a penalty, scikit-learn differs by the weak prior only."""
    outcomes, differences = judged(400, 0.3, 1.0, 80)
    outcomes[::5] = 0.5
    feature = np.tanh(differences / differences.std(ddof=1))[:, None]
    fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(
        np.concatenate([feature, feature]), np.repeat([1, 0], 400), sample_weight=np.concatenate([outcomes, 1 - outcomes]))
    expected = 1 / (1 + np.exp(-fitted.intercept_[0]))
    assert paired_rates(outcomes, differences).length_controlled == pytest.approx(expected, abs=1e-3)


def test_a_judge_of_lengths_only_gives_a_draw_at_equal_lengths():
    """The judge prefers the longer answer. The model wins most comparisons, but the controlled interval contains a draw."""
    outcomes, differences = judged(500, 0.0, 2.0, 90)
    found = paired_rates(outcomes, differences)
    assert found.bootstrap_low > 0.6 and found.length_controlled_low < 0.5 < found.length_controlled_high
    assert found.length_difference == pytest.approx(differences.mean())


def test_a_judge_that_ignores_lengths_gives_the_same_rate():
    outcomes, differences = judged(1000, 0.8, 0.0, 90, seed=1)
    found = paired_rates(outcomes, differences, resamples=300)
    assert found.length_controlled == pytest.approx(outcomes.mean(), abs=0.05)
    assert found.length_controlled_low < 1 / (1 + np.exp(-0.8)) < found.length_controlled_high


def test_the_intervals_contain_the_true_rates_in_about_95_percent_of_cases():
    """100 simulated evaluations: fewer than 88 would have a probability of 0.4% at 95% coverage."""
    true, inside = 1 / (1 + np.exp(-0.4)), 0
    for seed in range(100):
        found = paired_rates(*judged(120, 0.4, 1.0, 40, seed), resamples=100)
        inside += found.length_controlled_low <= true <= found.length_controlled_high
    assert inside >= 88


def test_the_bootstrap_interval_of_a_rate_is_close_to_the_normal_one():
    """200 wins, 100 losses and 100 ties have the mean 0.625."""
    outcomes = np.repeat([1, 0, 0.5], [200, 100, 100])
    variance = (200 * 0.375**2 + 100 * 0.625**2 + 100 * 0.125**2) / 400
    found, half = paired_rates(outcomes, np.arange(400)), 1.96 * (variance / 400) ** 0.5
    assert (found.bootstrap_low, found.bootstrap_high) == pytest.approx((0.625 - half, 0.625 + half), abs=0.006)


@pytest.mark.parametrize(("outcomes", "differences", "problem"), [
    ([1, 0, 1], [1, 2, -3], "few"),
    ([1] * 10, range(10), "constant"), ([0] * 10, range(10), "constant"),
    ([1, 0] * 5, [7] * 10, "equal_lengths"),
    ([0] * 5 + [1] * 5, range(10), "separable"), ([1] * 5 + [0] * 5, range(10), "separable"),
    ([0] * 4 + [0.5] + [1] * 5, range(10), "separable"),
    ([0] * 4 + [0.5, 0.5] + [1] * 4, range(10), None),  # ties at two differences overlap
    ([0.5] * 10, range(10), None)])
def test_undefined_rates_at_equal_lengths_have_a_reason(outcomes, differences, problem):
    found = paired_rates(outcomes, list(differences))
    assert found.length_controlled_problem == problem and (found.length_controlled is None) == (problem is not None)
    assert (found.length_controlled_low is None) == (found.length_controlled_high is None) == (problem is not None)


def test_only_ties_are_a_draw_at_equal_lengths():
    found = paired_rates([0.5] * 10, range(10))
    assert (found.length_controlled, found.bootstrap_low, found.bootstrap_high) == (0.5, 0.5, 0.5)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="two arrays"):
        paired_rates([1, 0], [1])
    with pytest.raises(ValueError, match="two arrays"):
        mean_difference([], [])


def test_weights_repeat_cases():
    """A regression with weights equals one in which each case is written as often as its weight says, and scipy's minimum."""
    rng = np.random.default_rng(0)
    features, outcome = rng.normal(size=(12, 2)), rng.choice([0, 0.5, 1], size=12)
    weights = rng.integers(0, 3, size=(3, 12))
    found = logistic_coefficients(features, outcome, (10.0, 2.5), weights=weights)
    for own, counts in zip(found, weights, strict=True):
        repeated = np.repeat(np.arange(12), counts)
        np.testing.assert_allclose(own, logistic_coefficients(features[repeated], outcome[repeated], (10.0, 2.5)), atol=1e-8)

        def loss(b, counts=counts):
            logits = features @ b
            return np.sum(counts * (np.logaddexp(0, logits) - outcome * logits)) + b[0] ** 2 / 200 + b[1] ** 2 / 12.5

        np.testing.assert_allclose(own, scipy.optimize.minimize(loss, np.zeros(2), tol=1e-10).x, atol=1e-4)


def test_a_mean_difference_is_paired():
    """The values differ widely between cases but by 1 or 3 within each: the mean is 2 and its standard error 1 / sqrt(100)."""
    values = np.arange(100) * 1000.0
    found = mean_difference(values + np.tile([1, 3], 50), values)
    assert (found["difference"], found["cases"]) == (2.0, 100)
    assert (found["low"], found["high"]) == pytest.approx((2 - 0.196, 2 + 0.196), abs=0.03)
    assert mean_difference([1, 2], [0, 0]) == {"difference": 1.5, "low": None, "high": None, "cases": 2}
