"""Number formats for progress lines, the final table and the report. None is shown as "-"."""

from __future__ import annotations

from typing import Any


def percent(rate: float) -> str:
    """A fraction as a percentage with one decimal: 0.78 is "78.0%"."""
    return f"{100 * rate:.1f}%"


def short_percent(rate: float) -> str:
    """A fraction as a percentage for running text, without a zero decimal: 0.78 is "78%"."""
    return percent(rate).replace(".0%", "%")


def number(value: Any) -> str:
    """A scalar (Python, numpy or JAX) with 4 significant digits; integers in full, with thousands separators."""
    if value is None:
        return "-"
    value = value.item() if hasattr(value, "item") else value
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"


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
