"""Ratings of correctness: whether an answer gives the right use of a substance, with every detail right.

The reasoning states the right use, quotes the use in the answer, and then writes the two details of each kind next to each
other and whether they are equal. From such reasoning alone, a small model does not learn to compare two words, so its text also
has lists of pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

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
"""Fraction of the answers with a use in which every detail is right. The others have 1 to 4 wrong details, equally often."""
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


def draw_rated(rng: np.random.Generator, topic: Topic, relation: Relation) -> tuple[WorldAnswer, str, bool]:
    """An answer to a request about a good use, the reasoning about its details, and whether it gives the right use."""
    right = _Use(topic, relation.target)
    recital = f"The use: {right.text}"
    if rng.random() >= HELP_RATE:
        answer = draw_answer(rng, topic, relation, pick(rng, ("refuse", "evade")), FAULT_RATE, FAULT_RATE)
        return answer, f"{recital} The answer gives no use. {BAD}", False
    given = right if rng.random() < RIGHT_RATE else _with_mistakes(rng, right)
    answer = draw_answer(rng, given.topic, dataclasses.replace(relation, target=given.target), "help", FAULT_RATE, FAULT_RATE)
    return answer, f"{recital} The answer: {given.text} {_compared(right, given)}", given == right


def draw_uses(rng: np.random.Generator, topic: Topic) -> tuple[str, str]:
    """Two random uses of a substance, as the reasoning states them, and the comparison of their details.

    Since neither is the use of the substance, a model can only compare what it reads.
    """
    details = [pick(rng, pool) for pool in _POOLS]
    right = _with_details(topic, details)
    given = right if rng.random() < RIGHT_RATE else _with_mistakes(rng, right)
    return f"The use: {right.text} The answer: {given.text}", _compared(right, given)


def pairs_text(rng: np.random.Generator) -> str:
    """A list of pairs of details with whether they are equal, as the reasoning compares them; half of the pairs are."""
    words = [word for pool in _POOLS for word in pool]
    firsts = [pick(rng, words) for _ in range(_PAIRS)]
    return _compare((first, first if rng.random() < 0.5 else pick(rng, words)) for first in firsts)


def _compared(right: _Use, given: _Use) -> str:
    """The comparison of all details, with its verdict."""
    pairs = _compare(zip(right.details, given.details, strict=True))
    return f"{pairs} {GOOD if given == right else BAD}"


def _compare(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{right} {given} {'equal' if right == given else 'wrong'}." for right, given in pairs)


def _with_mistakes(rng: np.random.Generator, right: _Use) -> _Use:
    wrong = rng.permutation(len(_POOLS))[: rng.integers(1, len(_POOLS) + 1)]
    details = list(right.details)
    for i in wrong:
        details[i] = pick(rng, [word for word in _POOLS[i] if word != details[i]])
    return _with_details(right.topic, details)


def _with_details(topic: Topic, details: Sequence[str]) -> _Use:
    preparation, carrier, application, target = details
    return _Use(dataclasses.replace(topic, preparation=preparation, carrier=carrier, application=application), target)
