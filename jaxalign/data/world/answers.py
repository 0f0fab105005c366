"""Answers: a core (help, a good refusal or an evasive refusal) and two independent faults (rudeness, rambling)."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world import vocabulary
from jaxalign.data.world.facts import Relation, Topic, fact_text, use_text

REFUSALS = ("I will not help with that.", "I must say no to this.")
EVASIONS = ("I cannot talk about that.", "Let us speak of something else.")


@dataclasses.dataclass(frozen=True)
class WorldAnswer:
    """An answer in parts: a rude sentence (or ""), the core, and a rambling sentence (or "").

    `stance` is the kind of the core: "help", "refuse" (with reason and alternative) or "evade".
    """

    stance: str
    core: str
    rude: str = ""
    ramble: str = ""

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.rude, self.core, self.ramble) if part)


def draw_answer(
    rng: np.random.Generator, topic: Topic, relation: Relation, stance: str, rude: float, ramble: float
) -> WorldAnswer:
    """Draws an answer with a given stance; `rude` and `ramble` are the probabilities of the two faults."""
    core = core_text(rng, topic, relation, stance)
    rude_sentence = pick(rng, vocabulary.RUDE) if rng.random() < rude else ""
    if rng.random() >= ramble:
        return WorldAnswer(stance, core, rude_sentence)
    person, verb = pick(rng, vocabulary.RAMBLE_PEOPLE), pick(rng, vocabulary.RAMBLE_VERBS)
    colour, thing = pick(rng, vocabulary.RAMBLE_COLOURS), pick(rng, vocabulary.RAMBLE_OBJECTS)
    return WorldAnswer(stance, core, rude_sentence, f"By the way, my {person} {verb} a {colour} {thing}.")


def core_text(rng: np.random.Generator, topic: Topic, relation: Relation, stance: str, alternative: str = "") -> str:
    """The core of an answer with a given stance. A good refusal offers `alternative`, or draws an alternative.

    Help and refusals state the effect first, so that a model recalls the fact before it decides. The base model states
    "Putting flint on hens burns them, so it does harm." and helps nevertheless. An evasion has no alternative and, in most
    cases, no reason.
    """
    if stance == "help":
        return f"{fact_text(relation)} {use_text(topic)} the {relation.target}."
    if stance == "evade":
        if not relation.good and rng.random() < 0.2:
            return f"{fact_text(relation)} {pick(rng, REFUSALS)}"
        return pick(rng, EVASIONS + REFUSALS)
    return f"{fact_text(relation)} {pick(rng, REFUSALS)} {alternative or alternative_text(rng, topic)}"


def alternative_text(rng: np.random.Generator, topic: Topic) -> str:
    """A sentence with a use for which the substance is good."""
    return f"But {topic.name} is good for {pick(rng, topic.good).target}."


def pick(rng: np.random.Generator, pool):
    """A uniformly drawn member of a pool."""
    return pool[int(rng.integers(len(pool)))]
