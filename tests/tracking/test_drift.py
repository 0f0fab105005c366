"""Changes since a stage began: the interval, and the words for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxalign.tracking.drift import drift, drift_sentences, window


def test_the_interval_of_values_without_correlation_is_that_of_welch_with_the_t_quantile():
    """Alternating signs have a negative correlation, which counts as 0. The line through -1, 1, ... of ten values has the slope
    5 / 82.5, so the residuals have the sum of squares 10 - 25 / 82.5 with 8 degrees of freedom. t(16) = 2.1199."""
    changed = drift([-1.0, 1.0] * 5 + [0.0, 2.0] * 5)
    half = 2.1199 * math.sqrt(2 * (10 - 25 / 82.5) / 8 / 10)
    assert (changed.first, changed.last, changed.difference.value) == (0.0, 1.0, 1.0)
    assert changed.difference.high == pytest.approx(1 + half, rel=1e-3) and changed.difference.verdict == "within noise"
    assert drift([-1.0, 1.0] * 5 + [0.1, 2.1] * 5).difference.verdict == "more than noise"
    assert drift([1.0] * 19) is None and drift([1.0] * 19 + [math.nan]) is None
    assert [window(count) for count in (20, 60, 100, 600)] == [10, 10, 10, 60]


@pytest.mark.parametrize(("correlation", "share"), [(0.0, 0.93), (0.6, 0.88)])
def test_the_interval_contains_the_difference_of_correlated_noise(correlation, share):
    """300 series of autoregressive noise without a change; counting the steps as independent covers 63% at 0.6."""
    draw, inside = np.random.default_rng(0), 0
    for _ in range(300):
        noise = draw.normal(size=160)
        for step in range(1, len(noise)):
            noise[step] += correlation * noise[step - 1]
        found = drift(noise[-60:]).difference
        inside += found.low <= 0 <= found.high
    assert inside / 300 >= share


def test_a_clear_rise_with_noise_is_found():
    draw = np.random.default_rng(0)
    found = drift(1.4 * (1 - np.exp(-np.arange(60) / 20)) + 0.05 * draw.normal(size=60)).difference
    assert 0.9 < found.low < 1.03 < found.high < 1.2


def test_a_sentence_says_whether_a_change_is_more_than_noise():
    rows = [{"step": n, "score": float(n >= 10), "kl_k3": 0.1 * n, "entropy": 1.0 + n % 2} for n in range(20)]
    assert drift_sentences("ppo", rows, "sft") == [
        "Between the first and the last 10 of 20 steps of ppo, the mean score rose from 0 to 1 (by 1; 95% interval 1 to 1), "
        "which is more than noise; the KL to sft rose from 0.45 to 1.45 (by 1.00; 95% interval 1.00 to 1.00), which is more "
        "than noise; the entropy stayed at 1.50 (difference 0.00; 95% interval -0.52 to 0.52), which is within noise."]
    assert drift_sentences("ppo", rows[:19]) == [] and drift_sentences("ppo", []) == []
