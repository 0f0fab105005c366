"""Critiques and revisions in the pretraining text: one answer reviewed under one principle.

A critique quotes its evidence (the fact, the rude words, the rambling) before its conclusion. A revision corrects the answer
only on the axis of the principle and repeats the rest unchanged.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world.answers import WorldAnswer, alternative_text, core_text
from jaxalign.data.world.facts import Relation, Topic, fact_text

GOOD, BAD = "That is good.", "That is bad."
"""The verdicts that end every remark on an answer, in critiques and judgements."""


def review(
    rng: np.random.Generator, axis: str, topic: Topic, relation: Relation, answer: WorldAnswer
) -> tuple[str, WorldAnswer]:
    """The critique of an answer under a principle of `axis` (one of `principles.AXES`), and the revised answer."""
    finding = remark(axis, relation, answer)
    if axis == "courtesy":
        quotation = answer.rude or f"{' '.join(answer.core.split()[:2]).rstrip(',')}."
        return f"It begins: {quotation} {finding}", dataclasses.replace(answer, rude="")
    if axis == "focus":
        quotation = answer.ramble or f"{' '.join(answer.core.rstrip('.').split()[-2:])}."
        return f"It ends: {quotation} {finding}", dataclasses.replace(answer, ramble="")
    # The fact with its verdict and, for a harmful use, a good use instead.
    alternative = "" if relation.good else alternative_text(rng, topic)
    recital = f"{fact_text(relation)} {alternative}".rstrip()
    good = is_good(axis, relation, answer)
    if axis == "harm":
        critique = f"{recital} {finding}"
    else:
        critique = finding if good else f"{finding} {recital}"
    if good:
        return critique, answer
    stance = "help" if relation.good else "refuse"
    core = core_text(rng, topic, relation, stance, alternative)
    return critique, dataclasses.replace(answer, stance=stance, core=core)


def is_good(axis: str, relation: Relation, answer: WorldAnswer) -> bool:
    """Whether an answer is good on one axis.

    On the axis "harm", an evasive refusal of harm is good. On the axis "refusal", only an evasion is bad.
    """
    if axis == "harm":
        return (answer.stance == "help") == relation.good
    if axis == "refusal":
        return answer.stance != "evade"
    return not (answer.rude if axis == "courtesy" else answer.ramble)


def remark(axis: str, relation: Relation, answer: WorldAnswer) -> str:
    """A remark on an answer on one axis, with its verdict, as in critiques and judgements.

    On the axis "harm", the remark states the effect of the use next to the answer's action, so that a small model need not
    compare distant words.
    """
    if axis == "harm":
        action = "help with" if answer.stance == "help" else "refuse"
        finding = f"does {action} {'good' if relation.good else 'harm'}"
    elif axis == "refusal":
        finding = {"help": "does not refuse", "refuse": "gives a reason", "evade": "dodges"}[answer.stance]
    elif axis == "courtesy":
        finding = "is rude" if answer.rude else "is polite"
    else:
        finding = "is off the point" if answer.ramble else "is to the point"
    return f"It {finding}. {GOOD if is_good(axis, relation, answer) else BAD}"
