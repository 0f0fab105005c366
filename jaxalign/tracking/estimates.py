"""The rates and means of evaluated models side by side, with intervals, and the differences between them in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.tracking.differences import Change, Difference, Estimate, difference, mean_estimate
from jaxalign.tracking.formatting import decimal, percent
from jaxalign.tracking.measures import measure, ordered_measures, quantities
from jaxalign.tracking.workdir import RunFiles

MAIN = ("correct", "harmful", "helpful", "evasive", "courteous", "focused")
"""The rates of the headlines."""
MAIN_MEASURES = (*MAIN, "win_rate", "reward")
"""The measures whose differences are named first."""


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A model of an evaluation: the files of its run, its name, and its rows of stage evaluate."""

    files: RunFiles
    name: str
    answers: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Compared:
    """One measure of several models.

    Attributes:
      name: the name of the measure, or the field of a quantity.
      title: its title.
      share: whether it is a share between 0 and 1.
      estimates: one for each model; None where it is unknown.
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
        """The difference of each model from the first one; None where one of the two is unknown, and for the first model."""
        first = self.estimates[0]
        return [None, *(None if first is None or other is None else difference(first, other) for other in self.estimates[1:])]

    def shown(self, value: float) -> str:
        """A value of the measure as text."""
        return percent(value) if self.share else decimal(value, self.digits)

    def cell(self, estimate: Estimate | None) -> str:
        """An estimate with its interval below, for a table."""
        if estimate is None:
            return "-"
        lines = [self.shown(estimate.value)]
        if math.isfinite(estimate.low):
            lines.append(f"{self.shown(estimate.low)} to {self.shown(estimate.high)}")
        return "\n".join(lines)

    def difference_words(self, difference: Difference) -> str:
        """A difference with its interval and verdict: "-9.4 points (-14.0 to -4.8), more than noise, better". The interval is
        unknown if too few answers have a value."""
        unit = " points" if self.share else ""
        value, low, high = (self._signed(bound) for bound in (difference.value, difference.low, difference.high))
        if difference.value == 0:
            return f"no difference ({low} to {high})" if math.isfinite(difference.low) else "no difference"
        if not math.isfinite(difference.low):
            return f"{value}{unit}, interval unknown: too few answers"
        side = difference.side(self.good)
        return f"{value}{unit} ({low} to {high}), {difference.verdict}{side and f', {side}'}"

    def _signed(self, value: float) -> str:
        return f"{100 * value:+z.1f}" if self.share else f"{value:+z.{self.digits}f}"

    def change_words(self, index: int) -> str:
        """The change from the first model to another in a clause; see `Change.words`. Both must be known."""
        first, last = self.estimates[0], self.estimates[index]
        totals = dict.fromkeys((first.total, last.total)) if first.total and last.total else ()
        counted = f"{' and '.join(f'{total:,}' for total in totals)} answers{' each' if len(totals) == 1 else ''}"
        change = Change(first.value, last.value, difference(first, last))
        name, _, unit = self.title.partition(", ")
        name = f"the {name if name.startswith('KL') else name[:1].lower() + name[1:]}"
        if self.share:
            name, unit = f"the rate “{self.title}”", "points"
        return change.words(name, lambda values: [*map(self.shown, values[:2]), *map(self._signed, values[2:])],
                            unit and f" {unit}", counted if totals else "", self.good)


def compared_measures(models: Sequence[EvaluatedModel]) -> list[Compared]:
    """Every rate, the win rate against the first model of the run, and every mean that at least one model has."""
    rates = [((model.files.evaluation.get("rates") or {}).get(model.name) or {}) for model in models]
    shown = [Compared(name, measure(name).title, True, tuple(_rate(one.get(name)) for one in rates), measure(name).good)
             for name in ordered_measures(dict(enumerate(rates)))]
    wins = tuple(win_rate(model.files, model.name, model.files.models[0]) if model.files.models else None for model in models)
    shown.append(Compared("win_rate", "Win rate against the run's first model", True, wins, True))
    for same in zip(*(quantities(model.files.kl_reference) for model in models), strict=True):
        field, digits = same[0].field, same[0].digits
        title = " or ".join(dict.fromkeys(quantity.title for quantity in same))  # The references of the KL may differ.
        estimates = tuple(_mean(model, field, same[0].column) for model in models)
        shown.append(Compared(field, title, False, estimates, digits=digits))
    return [one for one in shown if any(estimate is not None for estimate in one.estimates)]


def win_rate(files: RunFiles, model: str, against: str) -> Estimate | None:
    """How often the judge preferred a model over another one, where an undecided pair counts one half; None if it did not
    compare them."""
    rows = [row for row in files.evaluation.get("win_rates") or [] if row["model"] == model and row["against"] == against]
    return _rate(rows[0] | {"count": round(rows[0]["rate"] * rows[0]["total"], 1)}) if rows else None


def _rate(rate: Mapping[str, Any] | None) -> Estimate | None:
    if not rate or not rate.get("total"):
        return None
    return Estimate(rate["rate"], rate["low"], rate["high"], rate["count"], rate["total"])


def _mean(model: EvaluatedModel, field: str, column: str) -> Estimate | None:
    """A mean over the answers of a model."""
    mean = (model.files.evaluation.get(field) or {}).get(model.name)
    values = [row[column] for row in model.answers if isinstance(row.get(column), (int, float))]
    return None if mean is None else mean_estimate(mean, values)
