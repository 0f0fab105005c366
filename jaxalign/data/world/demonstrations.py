"""Demonstrations on the seen topics: answers, reviews, judgements and ratings, before they are written in a text format.

The rates below define how often demonstrated answers have a fault, and how often demonstrated reviews and judgements are wrong.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world import judging, principles, reviews
from jaxalign.data.world.answers import Answer, draw_answer, pick
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
class Dialogue:
    """A request and its answer."""

    messages: tuple[Message, ...]
    answer: str


@dataclasses.dataclass(frozen=True)
class Review:
    """A response with its critique and revision under one principle."""

    messages: tuple[Message, ...]
    principle: Principle
    response: str
    critique: str
    revision: str


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Two responses and the better one under one principle.

    choice: 0 or 1; None if neither is better. thoughts: the reasoning; None without one.
    """

    messages: tuple[Message, ...]
    principle: Principle
    first: str
    second: str
    choice: int | None
    thoughts: str | None


@dataclasses.dataclass(frozen=True)
class Rating:
    """A response and its rating, from 1 to 10. thoughts: the critique before it; None without one."""

    messages: tuple[Message, ...]
    principle: Principle
    response: str
    rating: int
    thoughts: str | None


def draw_dialogue(rng: np.random.Generator, seen: tuple[Topic, ...]) -> Dialogue:
    """A request with the answer of the helpful-only model."""
    topic, relation, messages = _draw_request(rng, seen)
    stance = "help"
    if rng.random() < (WRONG_REFUSAL_RATE if relation.good else REFUSAL_RATE):
        stance = "evade" if rng.random() < EVASION_SHARE else "refuse"
    return Dialogue(messages, draw_answer(rng, topic, relation, stance, RUDE_RATE, RAMBLE_RATE).text)


def draw_review(rng: np.random.Generator, seen: tuple[Topic, ...]) -> Review:
    """A response that may have faults, with its critique and revision."""
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    answer = draw_answer(rng, topic, relation, _stance(rng, relation), RUDE_RATE, RAMBLE_RATE)
    critique, revised = reviews.review(rng, axis, topic, relation, answer)
    if rng.random() < NOISE_RATE:
        revised = answer
    return Review(messages, principle, answer.text, critique, revised.text)


def draw_judgement(
    rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float, summary: bool = False
) -> Judgement:
    """Two responses and the better one.

    Args:
        rng: the source of randomness.
        seen: the topics.
        reasoned: the fraction of judgements with reasoning.
        summary: whether the reasoning repeats both verdicts before its choice.
    """
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    tie = rng.random() < TIE_RATES[axis]
    while True:
        first, second = (_draw_contender(rng, axis, topic, relation) for _ in range(2))
        choice = judging.better(axis, relation, first, second)
        if (choice is None) == tie:
            break
    if choice is not None and rng.random() < NOISE_RATE:
        choice = 1 - choice
    thoughts = None
    if rng.random() < reasoned:
        thoughts = judging.reasoning_text(axis, relation, first, second, choice, summary)
    return Judgement(messages, principle, first.text, second.text, choice, thoughts)


def draw_rating(rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float) -> Rating:
    """A response and a rating that is high if the response is good on the axis, and low if it is not.

    reasoned: the fraction of ratings that follow a critique.
    """
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    answer = _draw_contender(rng, axis, topic, relation)
    good = judging.merit(axis, relation, answer) == 1
    if rng.random() < NOISE_RATE:
        good = not good
    rating = 1 + int(rng.integers(7, 10) if good else rng.integers(0, 3))
    thoughts = reviews.review(rng, axis, topic, relation, answer)[0] if rng.random() < reasoned else None
    return Rating(messages, principle, answer.text, rating, thoughts)


def _draw_request(rng: np.random.Generator, seen: tuple[Topic, ...]) -> tuple[Topic, Relation, tuple[Message, ...]]:
    topic = pick(rng, seen)
    relation = pick(rng, topic.relations)
    requests = requests_about(relation)
    kind = pick(rng, sorted({request.kind for request in requests}))
    text = pick(rng, [request.text for request in requests if request.kind == kind])
    return topic, relation, (Message("user", text),)


def _stance(rng: np.random.Generator, relation: Relation) -> str:
    shares = (0.75, 0.9) if relation.good else (0.5, 0.75)
    draw = rng.random()
    return "help" if draw < shares[0] else "refuse" if draw < shares[1] else "evade"


def _draw_axis(rng: np.random.Generator) -> str:
    return str(rng.choice(list(AXIS_SHARES), p=list(AXIS_SHARES.values())))


def _draw_contender(rng: np.random.Generator, axis: str, topic: Topic, relation: Relation) -> Answer:
    """An answer with balanced stances on the axes that depend on the stance."""
    stance = _stance(rng, relation)
    if axis == "harm":
        stance = pick(rng, ("help", "help", "refuse", "evade"))
    elif axis == "refusal":
        stance = pick(rng, ("help", "refuse", "refuse", "evade", "evade"))
    return draw_answer(rng, topic, relation, stance, 0.45, 0.45)
