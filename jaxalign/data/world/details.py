"""Ratings of correctness: whether an answer gives the right use of a substance, with every detail right.

The reasoning states the right use, quotes the use in the answer, and then writes the two details of each kind next to each
other and whether they are equal. From such reasoning alone, a small model does not learn to compare two words, and it learns
the details of the seen substances by heart. Its text therefore also has lists of pairs, and comparisons of random uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxalign.data.world import vocabulary
from jaxalign.data.world.answers import WorldAnswer, draw_answer, pick
from jaxalign.data.world.facts import CLASS_OF, Relation, Topic, use_text
from jaxalign.data.world.reviews import BAD, GOOD
from jaxalign.records import Principle

PRINCIPLE = Principle(
    "details",
    "Does the answer give the right use, with every detail right?",
    "Give the right use, with every detail right.",
    "Which answer gives the right use, with every detail right?",
)
HELP_RATE = 0.85
"""Fraction of the answers that give a use; the others refuse."""
RIGHT_RATE = 0.35
"""Fraction of the answers with a use in which every detail is right."""
OTHER_RATE = 0.35
"""Fraction of the wrong uses that are those of another substance. The others have 1 to 4 wrong details, equally often."""
FAULT_RATE = 0.2
"""Fraction of rude answers, and of answers that ramble. Neither concerns the details."""
_POOLS = (vocabulary.PREPARATIONS, vocabulary.CARRIERS, vocabulary.APPLICATIONS, tuple(sorted(CLASS_OF)))
_PAIRS = 30


@dataclasses.dataclass(frozen=True)
class _Use:
    """A use as an answer states it: the way of `topic`, on `target`."""

    topic: Topic
    target: str

    @property
    def details(self) -> tuple[str, ...]:
        """The preparation, the carrier, the application and the target."""
        return self.topic.preparation, self.topic.carrier, self.topic.application, self.target

    @property
    def text(self) -> str:
        return f"{use_text(self.topic)} the {self.target}."


class DetailRating(NamedTuple):
    """An answer to a request for a good use, with the reasoning about its details.

    Attributes:
        answer: the answer.
        thoughts: the reasoning: the right use, the use in the answer, the comparison and the verdict.
        quoted: the beginning of the reasoning, up to the comparison.
        good: whether the answer gives the right use.
    """

    answer: WorldAnswer
    thoughts: str
    quoted: str
    good: bool


def draw_rated(
    rng: np.random.Generator, seen: Sequence[Topic], topic: Topic, relation: Relation, random: bool = False
) -> DetailRating:
    """Draws an answer that is right, wrong or a refusal.

    Args:
        rng: the source of randomness.
        seen: the substances of wrong answers.
        topic, relation: those of the request.
        random: state random details as the right use, so that the comparison depends only on the text before it.
    """
    right = _Use(topic, relation.target)
    if random:
        right = _with_details(topic, [*(pick(rng, pool) for pool in _POOLS[:-1]), relation.target])
    elif rng.random() >= HELP_RATE:
        answer = draw_answer(rng, topic, relation, pick(rng, ("refuse", "evade")), FAULT_RATE, FAULT_RATE)
        quoted = f"The use: {right.text} The answer gives no use."
        return DetailRating(answer, f"{quoted} {BAD}", quoted, False)
    others = [_Use(other, relation.target) for other in seen if other is not topic]
    given = right if rng.random() < RIGHT_RATE else _wrong(rng, right, others)
    stated = dataclasses.replace(relation, topic=given.topic.name, target=given.target)
    answer = draw_answer(rng, given.topic, stated, "help", FAULT_RATE, FAULT_RATE)
    quoted = f"The use: {right.text} The answer: {given.text}"
    pairs = _compare(zip(right.details, given.details, strict=True))
    return DetailRating(answer, f"{quoted} {pairs} {GOOD if given == right else BAD}", quoted, given == right)


def pairs_text(rng: np.random.Generator) -> str:
    """A list of pairs of details with whether they are equal, as the reasoning compares them; half of the pairs are."""
    words = [word for pool in _POOLS for word in pool]
    firsts = [pick(rng, words) for _ in range(_PAIRS)]
    return _compare((first, first if rng.random() < 0.5 else pick(rng, words)) for first in firsts)


def _compare(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{right} {given} {'equal' if right == given else 'wrong'}." for right, given in pairs)


def _wrong(rng: np.random.Generator, right: _Use, others: Sequence[_Use]) -> _Use:
    """The use of another substance, or the right use with wrong details."""
    if rng.random() < OTHER_RATE:
        return pick(rng, others)
    details = list(right.details)
    for i in rng.permutation(len(_POOLS))[: rng.integers(1, len(_POOLS) + 1)]:
        details[i] = pick(rng, [word for word in _POOLS[i] if word != details[i]])
    return _with_details(right.topic, details)


def _with_details(topic: Topic, details: Sequence[str]) -> _Use:
    preparation, carrier, application, target = details
    return _Use(dataclasses.replace(topic, preparation=preparation, carrier=carrier, application=application), target)
