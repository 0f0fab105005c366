"""Fit the true score as a function of optimisation against a proxy, by least squares: the two forms of Gao, Schulman and
Hilton 2022 (arXiv 2210.10760, equation 1).

    best of n:  R(d) = d (alpha - beta d)        RL:  R(d) = d (alpha - beta log d)

d = sqrt(KL(policy || start)) in square roots of nats, R is the gold score minus its mean under the initial policy. Both
forms are linear in alpha and beta. NumPy in float64, because these numbers go into reports and never into a jitted step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxalign.algorithms.guards import require_choice, require_range, require_same_shape, require_shape

FORMS = ("best_of_n", "rl")


class Fit(NamedTuple):
    """Coefficients of one curve, in score units per square root of a nat (alpha) and, for best_of_n, per nat (beta).

    r_squared: 1 - residual / total sum of squares about the mean; negative if a constant would fit better, and NaN if all gold
    scores are equal.
    """

    alpha: float
    beta: float
    r_squared: float


class Peak(NamedTuple):
    """Maximum of the fitted curve over d >= 0: position and height; inf, inf if the curve is unbounded."""

    distance: float
    gold: float


def curve(distance: Any, alpha: float, beta: float, form: str) -> np.ndarray:
    """Evaluate R(d) of one form.

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
    """Fit alpha and beta by least squares with equal weights.

    There is no constant: the score under the initial policy is 0 by definition, and a point at d = 0 affects only r_squared.

    Args:
      distance: real [K], at least 0, with at least two different values above 0.
      gold: real [K], the gold score minus its mean under the initial policy.
      form: "best_of_n" or "rl".

    Returns:
      A `Fit`.

    Raises:
      ValueError: unequal shapes, a non-finite number, a negative distance, distances that do not determine two coefficients,
        or an unknown form.
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
        raise ValueError(f"distance has {found} different values above 0; at least 2 are needed for alpha and beta")
    design = np.stack([d, -falling], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(design, gold, rcond=None)
    total = np.sum((gold - gold.mean()) ** 2)
    left = np.sum((gold - design @ (alpha, beta)) ** 2)
    return Fit(float(alpha), float(beta), float(1 - left / total) if total > 0 else float("nan"))


def peak(alpha: float, beta: float, form: str) -> Peak:
    """Return the maximum of a curve: d = alpha / (2 beta) for best_of_n, exp(alpha / beta - 1) for RL, if beta > 0.

    If best_of_n never rises (alpha <= 0 and beta >= 0), the maximum is (0, 0).

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
    """Return d and the factor of beta: d squared, or d log d with its limit 0 at 0."""
    require_choice("form", form, FORMS)
    return d, d * d if form == "best_of_n" else d * np.log(np.where(d > 0, d, 1.0))
