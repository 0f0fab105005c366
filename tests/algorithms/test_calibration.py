"""Reliability bins and ECE by hand and against a loop over bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.algorithms.calibration import expected_calibration_error, reliability_bins


def test_by_hand():
    prob, label = np.array([0.1, 0.3, 0.8, 0.9, 0.7]), np.array([0.0, 1.0, 1.0, 0.4, 0.6])
    bins = reliability_bins(prob, label, bins=2)
    np.testing.assert_allclose(bins.edges, [0, 0.5, 1])
    np.testing.assert_allclose(bins.confidence, [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(bins.accuracy, [0.5, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(bins.count, [2, 3])
    # (2 * |.5 - .2| + 3 * |2/3 - .8|) / 5 = (.6 + .4) / 5
    assert float(expected_calibration_error(prob, label, bins=2)) == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("bins", [3, 7, 10, 15])
def test_a_bin_holds_its_lower_edge_and_the_last_one_both(bins):
    prob = np.arange(bins + 1) / bins
    count = reliability_bins(prob, np.ones(bins + 1), bins).count
    np.testing.assert_array_equal(count, [*[1] * (bins - 1), 2])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    # Multiples of 1/128 less a half are no edge of ten bins, so that rounding decides nothing.
    prob, label, mask = (rng.integers(1, 128, 40) - 0.5) / 128, rng.random(40), rng.random(40) < 0.7
    error = 0.0
    for k in range(10):
        inside = [(p, y) for p, y, m in zip(prob, label, mask, strict=True) if m and k / 10 <= p < (k + 1) / 10]
        if inside:
            confidence = np.mean([p for p, _ in inside])
            accuracy = np.mean([y > 0.5 for _, y in inside])
            error += len(inside) * abs(accuracy - confidence)
    expected = error / max(mask.sum(), 1)
    assert float(expected_calibration_error(prob, label, 10, mask)) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_perfect_and_a_worst_predictor():
    outcome = np.array([1.0, 0.0, 1.0])
    assert float(expected_calibration_error(outcome, outcome)) == 0
    assert float(expected_calibration_error(1 - outcome, outcome)) == 1


def test_masked_predictions_change_nothing():
    prob, label = np.array([0.2, 0.9, 0.4]), np.array([0.0, 1.0, 0.5])
    masked = reliability_bins(prob, label, 5, np.array([1, 1, 0]))
    alone = reliability_bins(prob[:2], label[:2], 5)
    for got, expected in zip(masked, alone, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert float(expected_calibration_error(prob, label, 5, np.zeros(3))) == 0


def test_no_predictions_at_all():
    assert float(expected_calibration_error(np.zeros(0), np.zeros(0))) == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"prob is 1.5; in \[0, 1\]"):
        reliability_bins(np.array([1.5]), np.array([1.0]))
    with pytest.raises(ValueError, match="bins is 0; at least 1"):
        reliability_bins(np.array([0.5]), np.array([1.0]), bins=0)
    with pytest.raises(ValueError, match=r"prob has shape \(1, 1\)"):
        reliability_bins(np.array([[0.5]]), np.array([[1.0]]))
