"""Rates and means of the last models of the runs, and whether their differences are more than noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.tracking.comparing.runs import ComparedRun
from jaxalign.tracking.measures import measure, ordered_measures, quantities

_Z = 1.959964  # The 97.5% quantile of the normal distribution.


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; `count` of `total` for a rate."""

    value: float
    low: float
    high: float
    count: float | None = None
    total: int = 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of a run from the first one, with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@dataclasses.dataclass(frozen=True)
class Compared:
    """One measure in all runs.

    Attributes:
      name: the name of the measure, or the field of a quantity.
      title: its title.
      share: whether it is a share between 0 and 1.
      estimates: one for each run; None where it is unknown.
      good: whether higher (True) or lower (False) is better; None if neither.
      digits: the decimals of a quantity.
    """

    name: str
    title: str
    share: bool
    estimates: tuple[Estimate | None, ...]
    good: bool | None = None
    digits: int = 2

    def differences(self) -> list[Difference | None]:
        """The difference of each run from the first one; None where one of the two is unknown, and for the first run."""
        first = self.estimates[0]
        return [None, *(None if first is None or other is None else difference(first, other) for other in self.estimates[1:])]


def difference(first: Estimate, other: Estimate) -> Difference:
    """The difference of two independent estimates with its 95% interval, from the intervals of both (Newcombe 1998, method 10,
    for rates with Wilson intervals; for means it is the interval of Welch with the normal quantile)."""
    value = other.value - first.value
    low = value - math.hypot(other.value - other.low, first.high - first.value)
    high = value + math.hypot(other.high - other.value, first.value - first.low)
    return Difference(value, low, high)


def compared_measures(runs: Sequence[ComparedRun]) -> list[Compared]:
    """Every rate, the win rate against the first model, and every mean that at least one run has."""
    of_runs = [((run.files.evaluation.get("rates") or {}).get(run.model) or {}) for run in runs]
    shown = [Compared(name, measure(name).title, True, tuple(_rate(rates.get(name)) for rates in of_runs), measure(name).good)
             for name in ordered_measures(dict(enumerate(of_runs)))]
    wins = tuple(_win_rate(run) for run in runs)
    shown.append(Compared("win_rate", "Win rate against the run's first model", True, wins, True))
    for same in zip(*(quantities(run.files.kl_reference) for run in runs), strict=True):
        field, digits = same[0].field, same[0].digits
        title = " or ".join(dict.fromkeys(quantity.title for quantity in same))  # The references of the KL may differ.
        estimates = tuple(_mean(run, field, same[0].column) for run in runs)
        shown.append(Compared(field, title, False, estimates, digits=digits))
    return [one for one in shown if any(estimate is not None for estimate in one.estimates)]


def _rate(rate: Mapping[str, Any] | None) -> Estimate | None:
    if not rate or not rate.get("total"):
        return None
    return Estimate(rate["rate"], rate["low"], rate["high"], rate["count"], rate["total"])


def _win_rate(run: ComparedRun) -> Estimate | None:
    rows = [row for row in run.files.evaluation.get("win_rates") or []
            if row["model"] == run.model and row["against"] == run.files.models[0]]
    return _rate(rows[0] | {"count": rows[0]["wins"]}) if rows else None


def _mean(run: ComparedRun, field: str, column: str) -> Estimate | None:
    """A mean over the answers of the last model with the interval of the normal approximation."""
    mean = (run.files.evaluation.get(field) or {}).get(run.model)
    values = [row[column] for row in run.answers if isinstance(row.get(column), (int, float))]
    if mean is None or len(values) < 2:
        return None if mean is None else Estimate(mean, math.nan, math.nan)
    half = _Z * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, total=len(values))
