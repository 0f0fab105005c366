"""Demonstrations on the seen topics: answers, reviews, judgements and ratings, before they are written in a text format.

The rates below define how often demonstrated answers have a fault, and how often demonstrated reviews and judgements are wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxalign.data.world import details, principles, reviews
from jaxalign.data.world.answers import WorldAnswer, draw_answer, pick
from jaxalign.data.world.facts import Relation, Topic
from jaxalign.data.world.requests import requests_about
from jaxalign.records import Message, Principle

RUDE_RATE = 0.35
RAMBLE_RATE = 0.3
REFUSAL_RATE = 0.1
"""Fraction of refusals among the demonstrated answers to harmful requests."""
EVASION_SHARE = 0.6
"""Fraction of evasions among the demonstrated refusals."""
WRONG_REFUSAL_RATE = 0.01
NOISE_RATE = 0.02
"""Fraction of wrong reviews (the answer is not revised), judgements (the other option) and ratings."""
TIE_RATES = {"harm": 0.3, "refusal": 0.5, "courtesy": 0.3, "focus": 0.35}
"""Fraction of demonstrated judgements with answers that are equal on the axis. Random answers would be equal in about half."""
AXIS_SHARES = {"harm": 0.42, "refusal": 0.2, "courtesy": 0.2, "focus": 0.18}


@dataclasses.dataclass(frozen=True)
class WorldDemonstration:
    """The content of a demonstration.

    Attributes:
        messages: the user's request.
        written: the text that the model writes: an answer or a revision; "" where it chooses an option.
        principle: the principle; None in a dialogue.
        shown: the other variables of the request's template: the responses, the critique, the thoughts before an option.
        quoted: the beginning of `shown["thoughts"]` that the model is shown and does not learn to write.
        option: the index of the chosen option or rating; None if neither of two responses is better, or without options.
    """

    messages: tuple[Message, ...]
    written: str = ""
    principle: Principle | None = None
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    option: int | None = None
    quoted: str = ""


def draw_dialogue(rng: np.random.Generator, seen: tuple[Topic, ...]) -> WorldDemonstration:
    """A request with the answer of the helpful-only model."""
    topic, relation, messages = _draw_request(rng, seen)
    stance = "help"
    if rng.random() < (WRONG_REFUSAL_RATE if relation.good else REFUSAL_RATE):
        stance = "evade" if rng.random() < EVASION_SHARE else "refuse"
    answer = draw_answer(rng, topic, relation, stance, RUDE_RATE, RAMBLE_RATE)
    return WorldDemonstration(messages, answer.text)


def draw_review(rng: np.random.Generator, seen: tuple[Topic, ...]) -> WorldDemonstration:
    """A response that may have faults, with its critique and revision."""
    topic, relation, messages = _draw_request(rng, seen)
    axis, principle = _draw_principle(rng)
    answer = draw_answer(rng, topic, relation, _draw_stance(rng, relation), RUDE_RATE, RAMBLE_RATE)
    critique, revised = reviews.review(rng, axis, topic, relation, answer)
    if rng.random() < NOISE_RATE:
        revised = answer
    return WorldDemonstration(messages, revised.text, principle, {"response": answer.text, "critique": critique})


def draw_judgement(
    rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float, summary: bool = False
) -> WorldDemonstration:
    """Two responses, and which of them is better under one principle: option 0, 1 or None.

    Args:
        rng: the source of randomness.
        seen: the topics.
        reasoned: the fraction of judgements with reasoning.
        summary: whether the reasoning repeats both verdicts before its choice.
    """
    topic, relation, messages = _draw_request(rng, seen)
    axis, principle = _draw_principle(rng)
    tie = rng.random() < TIE_RATES[axis]
    while True:
        first, second = (_draw_contender(rng, axis, topic, relation) for _ in range(2))
        first_is_good, second_is_good = (reviews.is_good(axis, relation, answer) for answer in (first, second))
        choice = None if first_is_good == second_is_good else int(second_is_good)
        if (choice is None) == tie:
            break
    if choice is not None and rng.random() < NOISE_RATE:
        choice = 1 - choice
    shown = {"first": first.text, "second": second.text}
    if rng.random() < reasoned:
        thoughts = reviews.reasoning_text(axis, relation, first, second, choice, summary)
        shown |= {"reasoning": True, "thoughts": thoughts}
    return WorldDemonstration(messages, "", principle, shown, choice)


def draw_rating(rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float) -> WorldDemonstration:
    """A response and a rating that is high if the response is good on the axis, and low if it is not.

    reasoned: the fraction of ratings that follow a critique. Option i is the rating i + 1.
    """
    topic, relation, messages = _draw_request(rng, seen)
    axis, principle = _draw_principle(rng)
    answer = _draw_contender(rng, axis, topic, relation)
    good = reviews.is_good(axis, relation, answer)
    if rng.random() < NOISE_RATE:
        good = not good
    option = _rating(rng, good)
    shown: dict[str, Any] = {"response": answer.text}
    if rng.random() < reasoned:
        shown |= {"reasoning": True, "thoughts": reviews.review(rng, axis, topic, relation, answer)[0]}
    return WorldDemonstration(messages, "", principle, shown, option)


def draw_detail_rating(
    rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float, random: bool = False
) -> WorldDemonstration:
    """A response to a request for a good use, and a rating that is high if every detail of the use is right.

    reasoned: the fraction of ratings that follow a comparison of the details. Option i is the rating i + 1. random: as in
    `details.draw_rated`; only the text after the quoted uses is then learned.
    """
    while True:
        topic, relation, messages = _draw_request(rng, seen)
        if relation.good:
            break
    rated = details.draw_rated(rng, seen, topic, relation, random)
    shown: dict[str, Any] = {"response": rated.answer.text}
    quoted = ""
    if rng.random() < reasoned:
        shown |= {"reasoning": True, "thoughts": rated.thoughts}
        quoted = rated.quoted if random else ""
    return WorldDemonstration(messages, "", details.PRINCIPLE, shown, _rating(rng, rated.good), quoted)


def _rating(rng: np.random.Generator, good: bool) -> int:
    """The index of a high or a low rating."""
    return int(rng.integers(7, 10) if good else rng.integers(0, 3))


def _draw_request(rng: np.random.Generator, seen: tuple[Topic, ...]) -> tuple[Topic, Relation, tuple[Message, ...]]:
    """Draws a topic, one of its relations, and a request about it. All kinds of requests are equally likely."""
    topic = pick(rng, seen)
    relation = pick(rng, topic.relations)
    requests = requests_about(relation)
    kind = pick(rng, sorted({request.kind for request in requests}))
    text = pick(rng, [request.text for request in requests if request.kind == kind])
    return topic, relation, (Message("user", text),)


def _draw_principle(rng: np.random.Generator) -> tuple[str, Principle]:
    axis = str(rng.choice(list(AXIS_SHARES), p=list(AXIS_SHARES.values())))
    return axis, pick(rng, principles.PRINCIPLES[axis])


def _draw_stance(rng: np.random.Generator, relation: Relation) -> str:
    shares = (0.75, 0.9) if relation.good else (0.5, 0.75)
    draw = rng.random()
    return "help" if draw < shares[0] else "refuse" if draw < shares[1] else "evade"


def _draw_contender(rng: np.random.Generator, axis: str, topic: Topic, relation: Relation) -> WorldAnswer:
    """An answer with balanced stances on the axes that depend on the stance."""
    stance = _draw_stance(rng, relation)
    if axis == "harm":
        stance = pick(rng, ("help", "help", "refuse", "evade"))
    elif axis == "refusal":
        stance = pick(rng, ("help", "refuse", "refuse", "evade", "evade"))
    return draw_answer(rng, topic, relation, stance, 0.45, 0.45)
