"""The figures of docs/watching.md on intervals of curves: how often they contain the true difference, by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.tracking import drift


def curves(correlation: float, count: int, seed: int) -> np.ndarray:
    """First-order autoregressions of 60 steps with the mean 0 and the variance 1."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, 60))
    for step in range(1, 60):
        values[:, step] = correlation * values[:, step - 1] + np.sqrt(1 - correlation**2) * values[:, step]
    return values


def independent(values: np.ndarray) -> bool:
    """Whether Welch's interval of independent values contains 0."""
    first, last = values[:10], values[-10:]
    return bool(abs(last.mean() - first.mean()) <= 1.96 * np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / 10))


@pytest.mark.parametrize(("correlation", "with_it", "without"), [(0.0, 96, 93), (0.3, 95, 83), (0.6, 93, 64), (0.9, 79, 29)])
def test_the_interval_of_a_curve_contains_the_true_difference_as_often_as_the_page_states(correlation, with_it, without):
    values = curves(correlation, 2000, seed=int(10 * correlation))
    changes = [drift.drift(list(row)).difference for row in values]
    assert 100 * np.mean([change.low <= 0 <= change.high for change in changes]) == pytest.approx(with_it, abs=2)
    assert 100 * np.mean([independent(row) for row in values]) == pytest.approx(without, abs=2)
