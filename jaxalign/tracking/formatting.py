"""Number formats for progress lines, the final table and the report. None is shown as "-"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_LEAST = 0.001  # The smallest number whose digits are shown.


def percent(rate: float | None) -> str:
    """A fraction as a percentage with one decimal: 0.78 is "78.0%". Only 0 is "0.0%" and only 1 is "100.0%"."""
    if rate is None:
        return "-"
    if 0 < rate < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= rate < 1 else f"{100 * rate:.1f}%"


def short_percent(rate: float) -> str:
    """A fraction as a percentage for running text, without a zero decimal: 0.78 is "78%"."""
    return percent(rate).replace(".0%", "%")


def number(value: Any) -> str:
    """A scalar (Python, numpy or JAX) with 4 significant digits; integers in full, with thousands separators.

    A number between -0.001 and 0.001 is shown as "<0.001" or ">-0.001", since its digits are mostly rounding errors.
    """
    if value is None:
        return "-"
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < _LEAST:
        return f"<{_LEAST}" if value > 0 else f">-{_LEAST}"
    return f"{float(value):.4g}"


def decimal(value: float | None, digits: int) -> str:
    """A number with this many decimals; a number that rounds to 0 has no sign."""
    return "-" if value is None else f"{value:z.{digits}f}"


def percent_interval(rate: Mapping[str, float]) -> str:
    """The bounds of a rate's interval in percent, without the sign: "54.3 to 70.8"."""
    return f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}"


def rate_cell(rate: Mapping[str, Any] | None) -> str:
    """A rate as a cell of a table, with its interval below: "4.5% (9/200)"; "-" without a rate, or for a rate of no answers."""
    if not rate or not rate.get("total"):
        return "-"
    return f"{percent(rate['rate'])} ({number(rate['count'])}/{rate['total']:,})\n{percent_interval(rate)}"


def accuracy_interval(held_out: Mapping[str, Any]) -> str:
    """An accuracy with its 95% interval, if it is known: "89.0% (95% interval 81.4% to 93.8%)"; "-" without an accuracy."""
    accuracy, low, high = (held_out.get(name) for name in ("accuracy", "low", "high"))
    if accuracy is None:
        return "-"
    interval = "" if low is None or high is None else f" (95% interval {percent(low)} to {percent(high)})"
    return percent(accuracy) + interval


def span(values: Sequence[float]) -> list[str]:
    """Numbers of one curve, all with the decimals that show 3 digits of the largest: [2e-6, 0.293] is ["0.000", "0.293"].

    Whole numbers are shown without decimals. Numbers that are all below 0.001 or above 10,000 have 3 significant digits.
    """
    largest = max(map(abs, values))
    if largest < 1e4 and all(value == round(value) for value in values):
        return [f"{value:.0f}" for value in values]
    if largest and not _LEAST <= largest < 1e4:
        return [f"{value:.3g}" for value in values]
    digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
    return [decimal(value, digits) for value in values]


def share(count: int | None, total: int | None) -> str:
    """A count with its percentage of `total`: "78 (7.8%)"."""
    return number(count) if count is None or not total else f"{count:,} ({percent(count / total)})"


def seconds(value: float) -> str:
    """A duration as 1:02:03, or as 2:03 below an hour."""
    whole = max(0, round(value))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def capitalized(text: str) -> str:
    """The text with an upper-case first letter and the rest unchanged ("after RL" becomes "After RL")."""
    return text[:1].upper() + text[1:]
