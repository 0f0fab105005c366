"""Changes since a stage began: the interval, and the words for it."""

from __future__ import annotations

import math

import pytest

from jaxalign.tracking.drift import drift, drift_sentences


def test_the_interval_is_that_of_welch_with_the_normal_quantile():
    """First ten values: mean 0, variance 10/9; last ten: mean 1, variance 10/9. Half width: 1.96 * sqrt(2 * 10/9 / 10)."""
    values = [-1.0, 1.0] * 5 + [50.0] * 7 + [0.0, 2.0] * 5
    changed = drift(values)
    half = 1.959964 * math.sqrt(2 / 9)
    assert (changed.first, changed.last) == (0.0, 1.0)
    assert (changed.low, changed.high) == (pytest.approx(1 - half), pytest.approx(1 + half)) and changed.clear
    assert not drift([-2.0, 2.0] * 5 + [-1.0, 3.0] * 5).clear  # Half width 1.85.
    assert drift([1.0] * 19) is None and drift([1.0] * 19 + [math.nan]) is None


def test_a_sentence_says_whether_a_change_is_more_than_noise():
    rows = [{"step": n, "score": float(n >= 10), "entropy": 1.0 + n % 2} for n in range(20)]
    assert drift_sentences("ppo", rows) == [
        "Between the first and the last 10 of 20 steps of ppo, the mean score rose from 0 to 1 (by 1; 95% interval 1 to 1), "
        "which is more than noise; the entropy fell from 1.50 to 1.50 (by 0.00; 95% interval -0.46 to 0.46), which may "
        "be noise."]
    assert drift_sentences("ppo", rows[:19]) == [] and drift_sentences("ppo", []) == []
