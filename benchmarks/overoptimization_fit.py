"""How the true score moves as a policy is optimised against a proxy of it: the two forms of Gao, Schulman and Hilton 2022
(arXiv 2210.10760, equation 1), fitted by least squares.

    best of n:  R(d) = d (alpha - beta d)        RL:  R(d) = d (alpha - beta log d)

d = sqrt(KL(policy || start)) in square roots of nats, R the gold score less its mean at the start. Both are linear in alpha
and beta. NumPy in float64: these numbers go into reports, never into a jitted step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxalign.algorithms.guards import require_choice, require_range, require_same_shape, require_shape

FORMS = ("best_of_n", "rl")


class Fit(NamedTuple):
    """Coefficients of one curve, in units of the score a square root of a nat (alpha) and, for best_of_n, a nat (beta).

    r_squared: 1 - residual / total sum of squares about the mean; below 0 where a constant would fit better, and NaN where
    the gold scores are all equal.
    """

    alpha: float
    beta: float
    r_squared: float


class Peak(NamedTuple):
    """Where the fitted curve is highest over d >= 0, and its height; inf, inf where it rises for ever."""

    distance: float
    gold: float


def curve(distance: Any, alpha: float, beta: float, form: str) -> np.ndarray:
    """R(d) of one form.

    Args:
      distance: real, any shape, at least 0.
      alpha, beta: the coefficients.
      form: "best_of_n" or "rl".

    Returns:
      float64 of distance's shape; 0 at d = 0.

    Raises:
      ValueError: a distance below 0, or an unknown form.
    """
    distance = np.asarray(distance, np.float64)
    require_range("distance", distance, 0)
    d, falling = _terms(distance, form)
    return alpha * d - beta * falling


def fit(distance: Any, gold: Any, form: str) -> Fit:
    """The alpha and beta of least squared error, all points weighing the same.

    There is no constant: the score at the start is 0 by definition, and a point at d = 0 weighs on r_squared alone.

    Args:
      distance: real [K], at least 0; two of them or more differ from each other and from 0.
      gold: real [K], the gold score less its mean at the start.
      form: "best_of_n" or "rl".

    Returns:
      A `Fit`.

    Raises:
      ValueError: a shape differs, a number is not finite, a distance is below 0, the distances do not settle two
        coefficients, or an unknown form.
    """
    distance, gold = np.asarray(distance, np.float64), np.asarray(gold, np.float64)
    require_same_shape(distance=distance, gold=gold)
    require_shape("distance", distance, "[K]", (None,))
    top = float(np.finfo(np.float64).max)
    require_range("distance", distance, 0, top)
    require_range("gold", gold, -top, top)
    d, falling = _terms(distance, form)
    found = len(np.unique(d[d > 0]))
    if found < 2:
        raise ValueError(f"distance has {found} different values above 0; at least 2 settle alpha and beta")
    design = np.stack([d, -falling], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(design, gold, rcond=None)
    total = np.sum((gold - gold.mean()) ** 2)
    left = np.sum((gold - design @ (alpha, beta)) ** 2)
    return Fit(float(alpha), float(beta), float(1 - left / total) if total > 0 else float("nan"))


def peak(alpha: float, beta: float, form: str) -> Peak:
    """The highest point of a curve: d = alpha / (2 beta) for best_of_n, exp(alpha / beta - 1) for RL, where beta > 0.

    Where best_of_n never rises (alpha <= 0 and beta >= 0) it is the start, (0, 0).

    Raises:
      ValueError: an unknown form.
    """
    require_choice("form", form, FORMS)
    rises = alpha > 0 or form == "rl"
    if beta < 0 or (beta == 0 and alpha > 0):
        return Peak(float("inf"), float("inf"))
    if beta == 0 or not rises:
        return Peak(0.0, 0.0)
    if form == "best_of_n":
        return Peak(alpha / (2 * beta), alpha**2 / (4 * beta))
    with np.errstate(over="ignore"):
        distance = float(np.exp(alpha / beta - 1))
    return Peak(distance, beta * distance)


def _terms(d: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """d, and what beta multiplies: d squared, or d log d with its limit 0 at 0."""
    require_choice("form", form, FORMS)
    return d, d * d if form == "best_of_n" else d * np.log(np.where(d > 0, d, 1.0))
