"""The requests of stages to the server of `config.endpoint`, as a sentence and as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELD = "endpoint"
"""The field of a stage's summary with its counts."""

HEADER = ("Stage", "Sent", "Of these, repeated", "Answered from the store", "Prompt tokens", "Generated tokens",
          "Refused by the content filter", "Failures", "Money")

_NUMBERS = ("sent", "retries", "stored_hits", "prompt_tokens", "completion_tokens", "content_filter")


def amount(money: float) -> str:
    """An amount of money in any currency: "1.37", "0.00042"."""
    return f"{money:,.2f}" if money >= 1 or not money else f"{money:.2g}"


def sentence(counts: Mapping[str, Any], has_prices: bool) -> str:
    """The counts of a stage in a sentence. has_prices: whether the money is known."""
    parts = [
        _many(counts["sent"], "request", "sent"),
        f"{counts['stored_hits']:,} answered from the store",
        f"{_many(counts['prompt_tokens'], 'prompt token')} and {_many(counts['completion_tokens'], 'generated token')}",
        *([f"{amount(counts['money'])} spent"] if has_prices else []),
        f"{counts['content_filter']:,} refused by the content filter",
        f"{_many(counts['retries'], 'request')} repeated after a failure",
    ]
    return ", ".join(parts)


def row(name: str, counts: Mapping[str, Any]) -> list[str]:
    """The cells under `HEADER`."""
    kinds = [f"{kind} {count:,}" for kind, count in counts["failures"].items()]
    return [name, *(f"{counts[field]:,}" for field in _NUMBERS), ", ".join(kinds) or "none", amount(counts["money"])]


def total(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the counts of several stages."""
    kinds = sorted({kind for counts in each for kind in counts["failures"]})
    failures = {kind: sum(counts["failures"].get(kind, 0) for counts in each) for kind in kinds}
    return {"failures": failures} | {field: sum(counts[field] for counts in each) for field in (*_NUMBERS, "money")}


def _many(count: int, noun: str, verb: str = "") -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'} {verb}".rstrip()
