"""Confidence intervals, agreement and correlations. Computed on the host: for reports, never in a jitted step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np


def wilson_interval(count: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927), without continuity correction; also valid for small samples.

    Args:
      count: cases that have the property, in 0..total; halves are allowed (a tie).
      total: number of cases; 0 gives (0, 1).
      confidence: the interval's coverage, between 0 and 1.

    Returns:
      (low, high), in 0..1.

    Raises:
      ValueError: `count` is outside 0..total, or `confidence` is not between 0 and 1.
    """
    if not 0 <= count <= total:
        raise ValueError(f"count is {count}; a number in 0..total = {total} is expected")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; a number between 0 and 1 is expected")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = count / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Exact at the ends, where rounding would leave 1e-17 or 0.9999999.
    low = 0.0 if count == 0 else (centre - spread) / scale
    high = 1.0 if count == total else (centre + spread) / scale
    return low, high


def pearson(x: Any, y: Any) -> float | None:
    """Pearson's correlation of two lists of numbers; None if either is constant or has fewer than two elements.

    Args:
      x: real [B].
      y: real [B].

    Raises:
      ValueError: the shapes differ or are not [B].
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x is {x.shape} and y is {y.shape}; two arrays [B] are expected")
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / math.sqrt(x @ x) / math.sqrt(y @ y), -1, 1))


def spearman(x: Any, y: Any) -> float | None:
    """Spearman's rank correlation: `pearson` of the ranks, where equal numbers share their mean rank."""
    ranks = []
    for values in (x, y):
        _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])
    return pearson(*ranks)


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float | None], count: int, seed: int = 0, resamples: int = 1000, confidence: float = 0.95
) -> tuple[float, float] | None:
    """The percentile interval of a statistic under resampling with replacement (Efron 1979).

    Args:
      statistic: its value for the cases at these indices, int [count]; None where it is undefined.
      count: the number of cases.
      seed: determines the resamples.
      resamples: the number of resamples.
      confidence: the interval's coverage, between 0 and 1.

    Returns:
      (low, high); None if the statistic is undefined in more than half of the resamples.
    """
    if count == 0:
        return None
    rng = np.random.default_rng(seed)
    values = [statistic(rng.integers(count, size=count)) for _ in range(resamples)]
    known = [value for value in values if value is not None]
    if len(known) * 2 < resamples:
        return None
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Cohen's kappa of two raters (Cohen 1960): the agreement above chance, as a share of the largest possible one.

    1 is complete agreement, and 0 the agreement of raters who ignore the cases.

    Args:
      first: the category that the first rater gives to each of B cases.
      second: those of the second rater.

    Returns:
      At most 1; None without a case, or if both raters give a single category, the same to all cases.

    Raises:
      ValueError: the lengths differ.
    """
    if len(first) != len(second):
        raise ValueError(f"first has {len(first)} cases and second {len(second)}; equal numbers are expected")
    index = {category: i for i, category in enumerate(dict.fromkeys((*first, *second)))}
    table = np.zeros((len(index), len(index)), np.int64)
    np.add.at(table, ([index[category] for category in first], [index[category] for category in second]), 1)
    return kappa_of_counts(table)


def kappa_of_counts(table: np.ndarray) -> float | None:
    """Cohen's kappa from the number of cases with each two categories; see `cohen_kappa`.

    Args:
      table: int [K, K]; row i, column j: the cases to which the first rater gives category i and the second one category j.
    """
    # In whole numbers, so that complete agreement by chance is recognised exactly.
    count, agreed, chance = int(table.sum()), int(np.trace(table)), int(table.sum(axis=0) @ table.sum(axis=1))
    return (agreed * count - chance) / (count * count - chance) if count * count > chance else None


def logistic_coefficients(
    features: Any, outcome: Any, scale: Any = 2.5, steps: int = 50, weights: Any | None = None
) -> np.ndarray:
    """The coefficients of a logistic regression without intercept, P(outcome) = sigmoid(features @ coefficients).

    Each coefficient has a normal prior with mean 0, so that it is finite if a feature predicts every outcome. The posterior
    mode is found with Newton's method.

    Args:
      features: real [B, F].
      outcome: real [B], in [0, 1]; 0.5 is a tie.
      scale: above 0, the prior's standard deviation, for all coefficients or real [F]; infinity for maximum likelihood.
      steps: the maximum number of Newton steps.
      weights: real [R, B], at least 0: how often each case counts, in R separate regressions; None for once.

    Returns:
      float64 [F]; with weights [R, F].

    Raises:
      ValueError: the shapes differ.
    """
    features, outcome = np.asarray(features, np.float64), np.asarray(outcome, np.float64)
    if features.ndim != 2 or outcome.shape != features.shape[:1]:
        raise ValueError(f"features are {features.shape} and the outcome is {outcome.shape}; [B, F] and [B] are expected")
    counts = np.ones((1, len(outcome))) if weights is None else np.asarray(weights, np.float64)
    if counts.ndim != 2 or counts.shape[1:] != outcome.shape:
        raise ValueError(f"weights are {counts.shape} and the outcome is {outcome.shape}; [R, B] and [B] are expected")
    precision = np.broadcast_to(1 / np.asarray(scale, np.float64) ** 2, features.shape[1:])

    def loss(coefficients: np.ndarray) -> np.ndarray:
        logits = coefficients @ features.T
        return np.sum(counts * (np.logaddexp(0, logits) - outcome * logits), axis=1) + coefficients**2 @ precision / 2

    products = (features[:, :, None] * features[:, None, :]).reshape(len(features), -1)
    coefficients = np.zeros((len(counts), features.shape[1]))
    for _ in range(steps):
        probability = 0.5 * (1 + np.tanh(coefficients @ features.T / 2))
        gradient = (counts * (probability - outcome)) @ features + coefficients * precision
        hessian = ((counts * probability * (1 - probability)) @ products).reshape(*coefficients.shape, -1) + np.diag(precision)
        # The pseudo-inverse leaves a coefficient at 0 if its feature is 0 in all cases and it has no prior.
        if precision.all():
            step = np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
        else:
            step = (np.linalg.pinv(hessian, hermitian=True) @ gradient[:, :, None])[:, :, 0]
        if np.max(np.abs(step), initial=0) < 1e-10:
            break
        size, before = np.ones((len(step), 1)), loss(coefficients)
        while (overshot := (loss(coefficients - size * step) > before + 1e-12) & (size[:, 0] > 1e-6)).any():
            size[overshot] /= 2  # A full step may overshoot where the probabilities are close to 0 or 1.
        coefficients = coefficients - size * step
    return coefficients[0] if weights is None else coefficients


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided p-value of the exact test of McNemar (1947) that two paired rates are equal.

    Under the hypothesis, each pair with different outcomes is as likely to be a gain as a loss, so the gains are binomial.

    Args:
      gained: pairs of which only the second case has the property.
      lost: pairs of which only the first case has it.

    Returns:
      In (0, 1]; 1 without a pair with different outcomes.
    """
    tail = sum(math.comb(gained + lost, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (gained + lost))


def paired_difference(gained: int, lost: int, pairs: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of the difference of two paired rates, the second minus the first (Agresti and Min 2005, Statistics in
    Medicine 24: Wald's interval after half a pair is added to each of the four cells).

    Args:
      gained: pairs of which only the second case has the property.
      lost: pairs of which only the first case has it.
      pairs: all pairs.
      confidence: the interval's coverage, between 0 and 1.

    Returns:
      (low, high), in -1..1.
    """
    z, total = NormalDist().inv_cdf(0.5 + confidence / 2), pairs + 2
    difference = (gained - lost) / total
    spread = z * math.sqrt((gained + lost + 1) / total - difference**2) / math.sqrt(total)
    return max(-1.0, difference - spread), min(1.0, difference + spread)
