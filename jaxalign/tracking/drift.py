"""The changes of metrics since a stage began, with intervals that say whether they are more than noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.tracking.formatting import span

ROWS = 10
"""The rows at the start and at the end of a stage whose means are compared."""
_Z = 1.959964  # The 97.5% quantile of the normal distribution.


@dataclasses.dataclass(frozen=True)
class Drift:
    """The mean of a metric at the start and at the end of the rows, and the 95% interval of the difference."""

    first: float
    last: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0

    def words(self, name: str) -> str:
        """The change in a clause: "the score rose from 0.1 to 0.9 (by 0.8; 95% interval 0.6 to 1.0), more than noise"."""
        first, last, change, low, high = span([self.first, self.last, self.last - self.first, self.low, self.high])
        verb = "rose" if self.last > self.first else "fell"
        verdict = "is more than noise" if self.clear else "may be noise"
        return f"{name} {verb} from {first} to {last} (by {change}; 95% interval {low} to {high}), which {verdict}"


def drift(values: Sequence[float]) -> Drift | None:
    """The difference between the means of the first and the last `ROWS` values, which must not overlap; None with fewer values.

    The interval is that of Welch for independent rows with the normal quantile. Neighbouring steps depend on each other a
    little, so it is somewhat too narrow.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * ROWS:
        return None
    first, last = finite[:ROWS], finite[-ROWS:]
    half = _Z * math.sqrt((statistics.variance(first) + statistics.variance(last)) / ROWS)
    difference = statistics.fmean(last) - statistics.fmean(first)
    return Drift(statistics.fmean(first), statistics.fmean(last), difference - half, difference + half)


_SHOWN = (("the mean score", ("score",)), ("the KL to the reference", ("kl_full", "kl_k3", "kl")),
          ("the length of answers", ("response_length", "length")), ("the entropy", ("entropy",)),
          ("the loss", ("loss",)))


def drift_sentences(stage: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What changed since a stage began, in one sentence; none with too few rows."""
    clauses = []
    for title, names in _SHOWN:
        name = next((name for name in names if rows and name in rows[-1]), None)
        changed = drift([row[name] for row in rows if isinstance(row.get(name), (int, float))]) if name else None
        clauses += [] if changed is None else [changed.words(title)]
    if not clauses:
        return []
    return [f"Between the first and the last {ROWS} of {len(rows):,} steps of {stage}, {'; '.join(clauses)}."]
