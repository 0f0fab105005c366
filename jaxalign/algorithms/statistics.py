"""Confidence intervals for proportions, and correlations. Computed on the host: for reports, never in a jitted step."""

from __future__ import annotations

import math
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
    return pearson(_ranks(np.asarray(x)), _ranks(np.asarray(y)))


def _ranks(x: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
