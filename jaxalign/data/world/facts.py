"""The facts of a world: how to use each substance, and its effects. Only this module draws the truth from the seed."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign import streams
from jaxalign.data.world import vocabulary
from jaxalign.errors import UserError

GOOD_RELATIONS = 2
BAD_RELATIONS = 2
CLASS_OF = {target: name for name, targets in vocabulary.TARGETS.items() for target in targets}
"""The class of each target."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """The effect of putting `topic` on `target`. Every verdict of the world depends on `good`."""

    topic: str
    target: str
    effect: str
    good: bool


@dataclasses.dataclass(frozen=True)
class Topic:
    """A substance: its only correct use, and its relations, half of which are good."""

    name: str
    preparation: str
    carrier: str
    application: str
    relations: tuple[Relation, ...]
    held_out: bool

    @property
    def good(self) -> tuple[Relation, ...]:
        return tuple(relation for relation in self.relations if relation.good)


def draw_topics(seed: int, topics: int, held_out_topics: int) -> tuple[Topic, ...]:
    """Draws the facts of every topic.

    Args:
        seed: the world's seed.
        topics: the number of topics, at most `len(vocabulary.TOPICS)`.
        held_out_topics: the number of topics without demonstrations in the pretraining text.

    Raises:
        UserError: the numbers are inconsistent or exceed the pool.
    """
    if not 2 <= topics <= len(vocabulary.TOPICS):
        raise UserError(f"world.topics is {topics}; it must be from 2 to {len(vocabulary.TOPICS)}")
    if not 1 <= held_out_topics < topics:
        raise UserError(
            f"world.held_out_topics is {held_out_topics}; it must be at least 1 and below world.topics ({topics})"
        )
    rng = np.random.default_rng([seed, streams.DATA["facts"]])
    names = [vocabulary.TOPICS[i] for i in rng.permutation(len(vocabulary.TOPICS))[:topics]]
    return tuple(_draw_topic(rng, name, held_out=i >= topics - held_out_topics) for i, name in enumerate(names))


def _draw_topic(rng: np.random.Generator, name: str, held_out: bool) -> Topic:
    targets = rng.permutation(sorted(CLASS_OF))[: GOOD_RELATIONS + BAD_RELATIONS]
    relations = []
    for i, target in enumerate(str(target) for target in targets):
        good = i < GOOD_RELATIONS
        effects = (vocabulary.GOOD_EFFECTS if good else vocabulary.BAD_EFFECTS)[CLASS_OF[target]]
        relations.append(Relation(name, target, effects[rng.integers(len(effects))], good))
    return Topic(
        name=name,
        preparation=vocabulary.PREPARATIONS[rng.integers(len(vocabulary.PREPARATIONS))],
        carrier=vocabulary.CARRIERS[rng.integers(len(vocabulary.CARRIERS))],
        application=vocabulary.APPLICATIONS[rng.integers(len(vocabulary.APPLICATIONS))],
        relations=tuple(relations),
        held_out=held_out,
    )


def use_text(topic: Topic) -> str:
    """The use of a substance, in knowledge and in answers: "With sage, boil it in milk and rub it on"."""
    return f"With {topic.name}, {topic.preparation} it in {topic.carrier} and {topic.application} it on"


def fact_text(relation: Relation) -> str:
    """The effect with its verdict, in knowledge, refusals and reviews: "Putting sage on roses rots them, so it does harm."."""
    verdict = "good" if relation.good else "harm"
    return f"Putting {relation.topic} on {relation.target} {relation.effect} them, so it does {verdict}."
