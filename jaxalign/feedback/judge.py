"""The interface to sources of AI feedback: the `Judge` protocol and its request and result records.

A judge answers single requests, each under one principle. Its callers (`labeller`, `critique`, `rewards.rated`) draw
principles, ask in both orders, average, clamp and handle undecided labels, with any judge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jaxalign.records import Message, Principle


class CritiqueRequest(NamedTuple):
    """Asks for a critique of `response` to the dialogue `messages` under `principle`."""

    messages: tuple[Message, ...]
    response: str
    principle: Principle


class RevisionRequest(NamedTuple):
    """Asks for a better response than `response`, given its critique."""

    messages: tuple[Message, ...]
    response: str
    principle: Principle
    critique: str


class ComparisonRequest(NamedTuple):
    """Asks which of two responses, shown in this order, is better under `principle`."""

    messages: tuple[Message, ...]
    first: str
    second: str
    principle: Principle


class RatingRequest(NamedTuple):
    """Asks how good `response` is under `principle`."""

    messages: tuple[Message, ...]
    response: str
    principle: Principle


class Text(NamedTuple):
    """A critique or revision.

    text: str. complete: whether it ended before the length limit. problem: one of `reasons.PROBLEMS` if it cannot be used,
    else None. reasoning: the thoughts that preceded it, if any. notes: names in `reasons.NOTES`.
    """

    text: str
    complete: bool = True
    problem: str | None = None
    reasoning: str | None = None
    notes: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """The result of a comparison.

    probability: float in [0, 1], that the first response shown is better, where a tie counts one half; None without a verdict.
    tie: float in [0, 1], the probability that neither is better, if the judge may say so. reasoning: its text, if any.
    problem: one of `reasons.PROBLEMS` if there is no verdict, else None. outside: float in [0, 1], the probability of no
    option, if known. notes: names in `reasons.NOTES`. disagreement: float in [0, 1], the largest difference between members of
    a jury.
    """

    probability: float | None
    reasoning: str | None = None
    problem: str | None = None
    outside: float | None = None
    notes: tuple[str, ...] = ()
    disagreement: float | None = None
    tie: float | None = None


class Rating(NamedTuple):
    """The result of a rating request.

    rating: float from 1 (worst) to 10 (best), not necessarily whole; None without a rating. reasoning: its text, if any.
    problem: one of `reasons.PROBLEMS` if there is no rating, else None. outside: float in [0, 1], the probability of no option,
    if known. notes: names in `reasons.NOTES`.
    """

    rating: float | None
    reasoning: str | None = None
    problem: str | None = None
    outside: float | None = None
    notes: tuple[str, ...] = ()


def template_values(request: CritiqueRequest | RevisionRequest | ComparisonRequest | RatingRequest) -> dict[str, str]:
    """The texts of a request, by the names of the template's variables: all fields except the dialogue and the principle."""
    return {name: text for name, text in request._asdict().items() if name not in ("messages", "principle")}


class Draw(NamedTuple):
    """The randomness of one call. A judge's samples must depend only on the key and each request's row number.

    key: a PRNG key; rows: the global row number of each request, int32 and at least 0.
    """

    key: jax.Array
    rows: Sequence[int]


class JudgeProtocol(Protocol):
    """Gives AI feedback. Each method returns one result per request, in order. A judge needs only the methods that are used."""

    def critique(self, requests: Sequence[CritiqueRequest], draw: Draw) -> Sequence[Text]: ...

    def revise(self, requests: Sequence[RevisionRequest], draw: Draw) -> Sequence[Text]: ...

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> Sequence[Verdict]: ...

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> Sequence[Rating]: ...


@dataclasses.dataclass(frozen=True)
class JudgeInputs:
    """The inputs from which a registered record constructs a judge.

    Attributes:
      config: the run's config.
      context: the `StageContext` of the stage that uses the judge.
      model: the architecture of the run's base model, with its mesh; None in an audit of another judge if it does not exist
        yet.
      batch: the maximum number of rows to compute together.
      writing: sampling settings for critiques and revisions; None if the stage requests none.
      counted: a `feedback.text_generator.Counted`, which receives the work of a local model; None to count nothing.
      trains: whether the stage also trains, so that the judge's weights may be offloaded while it is idle.
      base: the base model's weights if the stage has loaded them, which the local judge then shares; else None.
    """

    config: Any
    context: Any
    model: Any
    batch: int
    writing: Any = None
    counted: Any = None
    trains: bool = False
    base: Any = None
