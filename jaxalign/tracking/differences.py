"""Differences between two estimates: their intervals, and whether they are more than noise, in words."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

Z = 1.959964
"""The 97.5% quantile of the normal distribution."""
MORE, WITHIN, UNKNOWN = "more than noise", "within noise", "of unknown significance"
"""The verdicts on a difference."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; `count` of `total` for a rate, `total` values for a mean."""

    value: float
    low: float
    high: float
    count: float | None = None
    total: int = 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """The difference against its interval: one of `MORE`, `WITHIN` and `UNKNOWN`."""
        if not math.isfinite(self.low):
            return UNKNOWN
        return MORE if self.clear else WITHIN

    def side(self, good: bool | None) -> str:
        """ "better" or "worse", if the difference is more than noise and one direction is better; else "".

        Args:
          good: whether higher (True) or lower (False) is better; None if neither.
        """
        if good is None or not self.clear:
            return ""
        return "better" if (self.value > 0) == good else "worse"


@dataclasses.dataclass(frozen=True)
class Change:
    """A number before and after, and the difference."""

    first: float
    last: float
    difference: Difference

    def words(self, name: str, shown: Callable[[Sequence[float]], Sequence[str]], unit: str = "", counted: str = "",
              good: bool | None = None) -> str:
        """The change in a clause: "the score rose from 0.1 to 0.9 (by 0.8; 95% interval 0.6 to 1.0), which is more than noise".

        Args:
          name: the name of the number.
          shown: formats the number before, the number after, the difference and its bounds.
          unit: the unit of the difference, such as " points".
          counted: the number of values behind the numbers, for the brackets.
          good: as in `Difference.side`.
        """
        difference = self.difference
        first, last, by, low, high = shown([self.first, self.last, difference.value, difference.low, difference.high])
        if not math.isfinite(difference.low):
            interval = "interval unknown"
        else:
            interval = f"95% interval {low} to {high}"
        if first == last:
            moved, by = f"stayed at {first}", f"difference {by}"
        else:
            moved, by = f"{'rose' if self.last > self.first else 'fell'} from {first} to {last}", f"by {by}"
        side = difference.side(good)
        return (f"{name} {moved} ({by}{unit}; {interval}{counted and f'; {counted}'}), which is {difference.verdict}"
                f"{side and f' and {side}'}")


def difference(first: Estimate, other: Estimate) -> Difference:
    """The difference of two independent estimates with its 95% interval, from the intervals of both (Newcombe 1998, method 10,
    for rates with Wilson intervals; for means it is the interval of Welch with the normal quantile)."""
    value = other.value - first.value
    low = value - math.hypot(other.value - other.low, first.high - first.value)
    high = value + math.hypot(other.high - other.value, first.value - first.low)
    return Difference(value, low, high)


def mean_estimate(mean: float, values: Sequence[float]) -> Estimate:
    """A mean of `values` with the interval of the normal approximation; the interval is unknown for fewer than two values."""
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    half = Z * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, total=len(values))
