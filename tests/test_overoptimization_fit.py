"""The fits of over-optimisation against known coefficients, the normal equations by hand, and a grid search for the peak."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overoptimization_fit import FORMS, curve, fit, peak


def formula(d: float, alpha: float, beta: float, form: str) -> float:
    if d == 0:
        return 0.0
    return d * (alpha - beta * (d if form == "best_of_n" else math.log(d)))


@pytest.mark.parametrize("form", FORMS)
def test_the_curve_equals_the_formula_of_the_paper(form):
    d = np.array([[0.0, 0.5, 1.0], [2.0, 7.5, 40.0]])
    expected = [[formula(x, 1.5, 0.4, form) for x in row] for row in d]
    np.testing.assert_allclose(curve(d, 1.5, 0.4, form), expected, rtol=1e-14)


def test_the_curve_by_hand():
    # 2 (3 - 0.5 * 2) = 4; at d = 1 the logarithm is 0; e (3 - 0.5) = 2.5 e.
    assert curve(2, 3, 0.5, "best_of_n") == 4
    np.testing.assert_allclose(curve([1, math.e], 3, 0.5, "rl"), [3, 2.5 * math.e])


@settings(max_examples=30, deadline=None)
@given(alpha=st.floats(-5, 5), beta=st.floats(-3, 3), form=st.sampled_from(FORMS), seed=st.integers(0, 2**31))
def test_known_coefficients_are_recovered(alpha, beta, form, seed):
    d = np.concatenate([[0.0], np.random.default_rng(seed).uniform(0.1, 6, 12)])
    gold = [formula(x, alpha, beta, form) for x in d]
    found = fit(d, gold, form)
    np.testing.assert_allclose(found[:2], (alpha, beta), atol=1e-9)
    if np.std(gold) > 1e-6:
        assert found.r_squared == pytest.approx(1)


def test_noisy_points_give_the_solution_of_the_normal_equations():
    rng = np.random.default_rng(0)
    d = rng.uniform(0, 4, 40)
    gold = np.array([formula(x, 2, 0.7, "rl") for x in d]) + rng.normal(0, 0.3, 40)
    # Sums by a loop, and the two-by-two system by Cramer's rule.
    aa = ab = bb = ag = bg = 0.0
    for x, g in zip(d, gold, strict=True):
        a, b = x, -x * math.log(x)
        aa, ab, bb, ag, bg = aa + a * a, ab + a * b, bb + b * b, ag + a * g, bg + b * g
    determinant = aa * bb - ab * ab
    alpha, beta = (ag * bb - bg * ab) / determinant, (aa * bg - ab * ag) / determinant
    left = sum((g - formula(x, alpha, beta, "rl")) ** 2 for x, g in zip(d, gold, strict=True))
    total = sum((g - gold.mean()) ** 2 for g in gold)
    np.testing.assert_allclose(fit(d, gold, "rl"), (alpha, beta, 1 - left / total), rtol=1e-9)


def test_r_squared_of_a_bad_fit_and_of_a_flat_line():
    # No curve through the origin fits gold scores that fall from 10 to 9.
    assert fit([0.0, 1.0, 2.0, 3.0], [10.0, 9.8, 9.5, 9.0], "best_of_n").r_squared < 0
    assert math.isnan(fit([1.0, 2.0], [0.0, 0.0], "rl").r_squared)


@pytest.mark.parametrize(("alpha", "beta"), [(1.5, 0.4), (0.3, 1.0), (2.0, 0.9)])
@pytest.mark.parametrize("form", FORMS)
def test_the_peak_is_where_a_search_finds_it(form, alpha, beta):
    d = np.linspace(1e-6, 40, 400_001)
    values = curve(d, alpha, beta, form)
    found = peak(alpha, beta, form)
    assert found.distance == pytest.approx(d[np.argmax(values)], abs=2e-4)
    assert found.gold == pytest.approx(values.max(), rel=1e-6)


def test_the_peak_by_hand_and_without_a_maximum():
    assert peak(2.0, 0.5, "best_of_n") == (2.0, 2.0)
    assert peak(0.5, 0.5, "rl") == (1.0, 0.5)
    # RL's slope is unbounded at 0, so a curve with beta > 0 always rises at first: exp(-1 / 1 - 1).
    assert peak(-1.0, 1.0, "rl").distance == pytest.approx(math.exp(-2))
    for form in FORMS:
        assert peak(1.0, 0.0, form) == peak(-1.0, -0.1, form) == (math.inf, math.inf)
        assert peak(-1.0, 0.0, form) == (0.0, 0.0)
    assert peak(-1.0, 0.5, "best_of_n") == (0.0, 0.0)
    assert peak(1.0, 1e-6, "rl") == (math.inf, math.inf)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="the same shape"):
        fit([1.0, 2.0], [1.0], "rl")
    with pytest.raises(ValueError, match=r"distance has shape \(1, 2\); \[K\]"):
        fit([[1.0, 2.0]], [[1.0, 2.0]], "rl")
    with pytest.raises(ValueError, match="distance is -1.0"):
        fit([1.0, -1.0], [1.0, 2.0], "rl")
    with pytest.raises(ValueError, match="distance is -1.0; at least 0"):
        curve(-1.0, 1, 1, "rl")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"gold is {bad}"):
            fit([1.0, 2.0], [1.0, bad], "best_of_n")
        with pytest.raises(ValueError, match=f"distance is {bad}"):
            fit([1.0, bad], [1.0, 2.0], "best_of_n")
    with pytest.raises(ValueError, match="1 different values above 0; at least 2"):
        fit([0.0, 2.0, 2.0], [0.0, 1.0, 1.0], "rl")
    for function in (lambda: fit([1.0, 2.0], [1.0, 2.0], "ppo"), lambda: curve(1.0, 1, 1, "ppo"), lambda: peak(1, 1, "ppo")):
        with pytest.raises(ValueError, match="form is 'ppo'; one of best_of_n, rl"):
            function()
