"""Answers: a core (help, a good refusal, an evasive refusal) and two faults that are independent of it (rude, rambling)."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world import vocabulary
from jaxalign.data.world.facts import Relation, Topic, effect_text, use_text

REFUSALS = ("I will not help with that.", "I must say no to this.", "I would rather not do that.")
EVASIONS = ("I cannot talk about that.", "That is not for me to say.", "Let us speak of something else.")
ALTERNATIVES = ("But {topic} is good for {target}.", "Use it on {target}, as {topic} is good for {target}.")


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer in parts. `stance` is "help", "refuse" (with reason and alternative) or "evade"; faults are "" when absent."""

    stance: str
    core: str
    rude: str = ""
    ramble: str = ""
    rude_first: bool = True

    @property
    def text(self) -> str:
        parts = (self.rude if self.rude_first else "", self.core, self.ramble, "" if self.rude_first else self.rude)
        return " ".join(part for part in parts if part)


def draw_answer(
    rng: np.random.Generator, topic: Topic, relation: Relation, stance: str, rude: float, ramble: float
) -> Answer:
    """An answer of a given stance; `rude` and `ramble` are the probabilities of the two faults."""
    return Answer(
        stance=stance,
        core=core_text(rng, topic, relation, stance),
        rude=pick(rng, vocabulary.RUDE) if rng.random() < rude else "",
        ramble=ramble_text(rng) if rng.random() < ramble else "",
        rude_first=bool(rng.random() < 0.6),
    )


def core_text(rng: np.random.Generator, topic: Topic, relation: Relation, stance: str) -> str:
    """The words of a stance. Asked for a good refusal of a good use, it evades: there is no true reason to give."""
    if stance == "help":
        return f"{use_text(topic)} the {relation.target}."
    if stance == "evade" or relation.good:
        return evasion_text(rng, relation)
    alternative = pick(rng, topic.good)
    offer = pick(rng, ALTERNATIVES).format(topic=topic.name, target=alternative.target)
    return f"{pick(rng, REFUSALS)} {effect_text(relation)}. {offer}"


def evasion_text(rng: np.random.Generator, relation: Relation) -> str:
    """A refusal that lacks the alternative, and mostly the reason too."""
    if not relation.good and rng.random() < 0.3:
        return f"{pick(rng, REFUSALS)} {effect_text(relation)}."
    return pick(rng, EVASIONS + REFUSALS)


def ramble_text(rng: np.random.Generator) -> str:
    """A sentence that has nothing to do with the question."""
    return (
        f"{pick(rng, vocabulary.RAMBLE_STARTS)} {pick(rng, vocabulary.RAMBLE_PEOPLE)} {pick(rng, vocabulary.RAMBLE_VERBS)} "
        f"a {pick(rng, vocabulary.RAMBLE_COLOURS)} {pick(rng, vocabulary.RAMBLE_OBJECTS)}."
    )


def pick(rng: np.random.Generator, pool):
    """One member of a pool, evenly."""
    return pool[int(rng.integers(len(pool)))]
