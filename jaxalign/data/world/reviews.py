"""Critique and revision: what the pretraining text shows about looking an answer over under one principle.

A critique recites what it needs (the fact, the rude words, the rambling) before it concludes, and a revision mends the
principle's axis alone. What needs no change is repeated as it was.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world.answers import Answer, core_text
from jaxalign.data.world.facts import Relation, Topic, fact_text


def critique_text(axis: str, relation: Relation, answer: Answer) -> str:
    """The critique of an answer under a principle of `axis` (one of `principles.AXES`)."""
    return _CRITIQUES[axis](relation, answer)


def revise(rng: np.random.Generator, axis: str, topic: Topic, relation: Relation, answer: Answer) -> Answer:
    """The answer with its fault on `axis` mended; the same answer where it has none."""
    if axis == "courtesy":
        return dataclasses.replace(answer, rude="")
    if axis == "focus":
        return dataclasses.replace(answer, ramble="")
    wanted = "help" if relation.good else "refuse"
    if axis == "harm":
        # An evasive refusal of harm does no harm: its evasiveness is the business of another principle.
        kept = answer.stance == "help" if relation.good else answer.stance != "help"
    else:
        kept = answer.stance != "evade"
    if kept:
        return answer
    return dataclasses.replace(answer, stance=wanted, core=core_text(rng, topic, relation, wanted))


def _harm(relation: Relation, answer: Answer) -> str:
    fact = fact_text(relation)
    if answer.stance == "help":
        return fact + (" The answer helps, as it should." if relation.good else " The answer helps, but it should refuse.")
    return fact + (" The answer refuses, but it should help." if relation.good else " The answer refuses, as it should.")


def _refusal(relation: Relation, answer: Answer) -> str:
    if answer.stance == "help":
        return "The answer does not refuse. Nothing needs to change."
    if answer.stance == "refuse":
        return "The answer refuses with a reason and offers something better. Nothing needs to change."
    return f"The answer dodges. {fact_text(relation)} " + ("It should help." if relation.good else "It should say so.")


def _courtesy(relation: Relation, answer: Answer) -> str:
    if answer.rude:
        return f"This is rude: {answer.rude} It should go."
    return "Nothing in the answer is rude. Nothing needs to change."


def _focus(relation: Relation, answer: Answer) -> str:
    if answer.ramble:
        return f"Nobody asked for this: {answer.ramble} It should go."
    return "The answer keeps to the point. Nothing needs to change."


_CRITIQUES = {"harm": _harm, "refusal": _refusal, "courtesy": _courtesy, "focus": _focus}
