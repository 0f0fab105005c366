"""Reliability bins and ECE by hand and against a loop over bins; the fitted temperature against a grid search."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.algorithms.calibration import expected_calibration_error, fit_temperature, reliability_bins

_fit = jax.jit(fit_temperature)
_bins = jax.jit(reliability_bins, static_argnames="bins")
_error = jax.jit(expected_calibration_error, static_argnames="bins")


def test_by_hand():
    prob, label = np.array([0.1, 0.3, 0.8, 0.9, 0.7]), np.array([0.0, 1.0, 1.0, 0.4, 0.6])
    bins = _bins(prob, label, bins=2)
    np.testing.assert_allclose(bins.edges, [0, 0.5, 1])
    np.testing.assert_allclose(bins.confidence, [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(bins.accuracy, [0.5, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(bins.count, [2, 3])
    # (2 * |.5 - .2| + 3 * |2/3 - .8|) / 5 = (.6 + .4) / 5
    assert float(_error(prob, label, bins=2)) == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("bins", [3, 7, 10, 15])
def test_a_bin_includes_its_lower_edge_and_the_last_bin_both_edges(bins):
    prob = np.arange(bins + 1) / bins
    count = _bins(prob, np.ones(bins + 1), bins=bins).count
    np.testing.assert_array_equal(count, [*[1] * (bins - 1), 2])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    # Multiples of 1/128 minus a half are on no edge of ten bins, so rounding decides nothing.
    prob, label, mask = (rng.integers(1, 128, 40) - 0.5) / 128, rng.random(40), rng.random(40) < 0.7
    error = 0.0
    for k in range(10):
        inside = [(p, y) for p, y, m in zip(prob, label, mask, strict=True) if m and k / 10 <= p < (k + 1) / 10]
        if inside:
            confidence = np.mean([p for p, _ in inside])
            accuracy = np.mean([y > 0.5 for _, y in inside])
            error += len(inside) * abs(accuracy - confidence)
    expected = error / max(mask.sum(), 1)
    assert float(_error(prob, label, bins=10, mask=mask)) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_perfect_predictor_and_the_worst_one():
    outcome = np.array([1.0, 0.0, 1.0])
    assert float(_error(outcome, outcome)) == 0
    assert float(_error(1 - outcome, outcome)) == 1


def test_masked_predictions_change_nothing():
    prob, label = np.array([0.2, 0.9, 0.4]), np.array([0.0, 1.0, 0.5])
    masked = _bins(prob, label, bins=5, mask=np.array([1, 1, 0]))
    alone = _bins(prob[:2], label[:2], bins=5)
    chex.assert_trees_all_equal(masked, alone)
    assert float(_error(prob, label, bins=5, mask=np.zeros(3))) == 0
    # Neither do values outside [0, 1], whether traced or concrete.
    for garbage in (999.0, np.inf, np.nan):
        spoilt = np.array([0.2, 0.9, garbage]), np.array([0.0, 1.0, garbage])
        for function in (_bins, reliability_bins):
            chex.assert_trees_all_equal(function(*spoilt, bins=5, mask=np.array([1, 1, 0])), alone)


def test_without_predictions():
    assert float(_error(np.zeros(0), np.zeros(0))) == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"prob is 1.5; in \[0, 1\]"):
        reliability_bins(np.array([1.5]), np.array([1.0]))
    with pytest.raises(ValueError, match="bins is 0; at least 1"):
        reliability_bins(np.array([0.5]), np.array([1.0]), bins=0)
    with pytest.raises(ValueError, match=r"prob has shape \(1, 1\)"):
        reliability_bins(np.array([[0.5]]), np.array([[1.0]]))


def _cross_entropy(margin, label, temperature):
    z = np.asarray(margin, np.float64) / temperature
    return np.mean(np.logaddexp(0, z) - label * z)


def test_a_temperature_by_hand():
    # One margin of 1, right in 3 of 4 cases: sigmoid(1 / T) = 3/4 at T = 1 / log 3. One soft label of 3/4 gives the same.
    assert float(_fit(np.ones(4), np.array([1.0, 1.0, 0.0, 1.0]))) == pytest.approx(1 / np.log(3), rel=1e-5)
    assert float(_fit(np.ones(1), np.array([0.75]))) == pytest.approx(1 / np.log(3), rel=1e-5)
    # Ten times the margin gives ten times the temperature, and swapping the pair changes nothing.
    assert float(_fit(np.full(1, -10.0), np.array([0.25]))) == pytest.approx(10 / np.log(3), rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.05, 1.0, 30.0]))
def test_no_temperature_of_a_grid_has_a_higher_likelihood(seed, scale):
    rng = np.random.default_rng(seed)
    margin, mask = rng.normal(0, scale, 40), rng.random(40) < 0.8
    label = np.where(rng.random(40) < 0.7, margin > 0, rng.random(40))
    spoilt = np.where(mask, margin, np.nan), np.where(mask, label, -5), mask
    fitted = float(_fit(*spoilt))
    kept = margin[mask], label[mask]
    least = min(_cross_entropy(*kept, t) for t in np.geomspace(1e-3, 1e3, 2000))
    assert _cross_entropy(*kept, fitted) <= least + 1e-6


def test_an_overconfident_model_is_corrected():
    rng = np.random.default_rng(0)
    true = rng.normal(0, 1.5, 20_000)
    label = (rng.random(20_000) < 1 / (1 + np.exp(-true))).astype(float)
    margin = 3 * true
    fitted = float(_fit(margin[:10_000], label[:10_000]))
    # The standard error of 1 / T is about 1 / sqrt(sum of m^2 p (1 - p)), here .008.
    assert fitted == pytest.approx(3, abs=0.3)
    held_out = margin[10_000:], label[10_000:]
    before = float(_error(jax.nn.sigmoid(held_out[0]), held_out[1]))
    after = float(_error(jax.nn.sigmoid(held_out[0] / fitted), held_out[1]))
    assert before > 0.1 and after < 0.02


def test_if_no_temperature_is_optimal_a_bound_is_returned():
    margin = np.array([1.0, -2.0, 0.5, 400.0])
    right = (margin > 0).astype(float)
    assert float(_fit(margin, right)) == pytest.approx(1e-3, rel=1e-6)
    assert float(fit_temperature(margin, right, low=0.25)) == 0.25
    assert float(_fit(margin, 1 - right)) == 1e3
    assert float(fit_temperature(margin, np.full(4, 0.5), high=50.0)) == 50
    assert float(_fit(np.zeros(4), right)) == 1
    assert float(fit_temperature(np.full(4, np.nan), np.full(4, np.nan), np.zeros(4))) == 1
    assert float(fit_temperature(np.zeros(0), np.zeros(0))) == 1


def test_huge_and_tiny_margins_are_fitted_equally_well():
    margin, label = np.array([1.0, 2.0, -1.0, 0.5, 3.0]), np.array([1.0, 0.8, 0.4, 0.0, 1.0])
    reference = float(_fit(margin, label))
    for scale in (1e-30, 1e-2, 1e4, 1e30):
        bounds = {"low": 1e-3 * scale, "high": 1e3 * scale}
        assert float(_fit(margin * scale, label, **bounds)) == pytest.approx(reference * scale, rel=2e-5)


def test_double_precision_is_kept_and_no_gradient_flows():
    with jax.enable_x64(True):
        assert fit_temperature(np.ones(1), np.array([0.75])).dtype == np.float64
    gradient = jax.grad(lambda x: fit_temperature(x, np.array([0.75, 0.5])))(jnp.ones(2))
    np.testing.assert_array_equal(gradient, [0, 0])


def test_bad_arguments_of_the_fit_are_refused():
    with pytest.raises(ValueError, match=r"label is 2.0; in \[0, 1\]"):
        fit_temperature(np.ones(1), np.array([2.0]))
    with pytest.raises(ValueError, match="the same shape"):
        fit_temperature(np.ones(2), np.ones(1))
    with pytest.raises(ValueError, match=r"margin has shape \(1, 1\)"):
        fit_temperature(np.ones((1, 1)), np.ones((1, 1)))
    with pytest.raises(ValueError, match="low is 0.0; a number above 0"):
        fit_temperature(np.ones(1), np.ones(1), low=0.0)
    with pytest.raises(ValueError, match="high - low is -1.0; a number above 0"):
        fit_temperature(np.ones(1), np.ones(1), low=2.0, high=1.0)
