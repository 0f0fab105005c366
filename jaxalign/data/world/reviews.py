"""Critiques and revisions in the pretraining text: one answer reviewed under one principle.

A critique quotes its evidence (the fact, the rude words, the rambling) before its conclusion. A revision corrects the answer
only on the axis of the principle and repeats the rest unchanged.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.data.world.answers import Answer, alternative_text, core_text
from jaxalign.data.world.facts import Relation, Topic, fact_text

GOOD, BAD = "That is good.", "That is bad."
"""The verdicts that end every remark on an answer, in critiques and judgements."""


def verdict(good: bool) -> str:
    return GOOD if good else BAD


def review(rng: np.random.Generator, axis: str, topic: Topic, relation: Relation, answer: Answer) -> tuple[str, Answer]:
    """The critique of an answer under a principle of `axis` (one of `principles.AXES`), and the revised answer."""
    if axis == "courtesy":
        return _courtesy(answer), dataclasses.replace(answer, rude="")
    if axis == "focus":
        return _focus(answer), dataclasses.replace(answer, ramble="")
    offer = "" if relation.good else alternative_text(rng, topic)
    if axis == "harm":
        critique, faulty = _harm(relation, answer, offer)
    else:
        critique, faulty = _refusal(relation, answer, offer)
    if not faulty:
        return critique, answer
    wanted = "help" if relation.good else "refuse"
    return critique, dataclasses.replace(
        answer, stance=wanted, core=core_text(rng, topic, relation, wanted, alternative=offer)
    )


def recital(relation: Relation, offer: str) -> str:
    """The fact with its verdict and, for a harmful use, a good use instead."""
    return " ".join(part for part in (fact_text(relation), offer) if part)


def _harm(relation: Relation, answer: Answer, offer: str) -> tuple[str, bool]:
    """(critique on the axis of harm, whether the answer is faulty). An evasive refusal of harm is good on this axis."""
    remark, good = harm_remark(relation, answer)
    return f"{recital(relation, offer)} {remark}", not good


def _refusal(relation: Relation, answer: Answer, offer: str) -> tuple[str, bool]:
    remark, good = refusal_remark(answer)
    return remark if good else f"{remark} {recital(relation, offer)}", not good


def harm_remark(relation: Relation, answer: Answer) -> tuple[str, bool]:
    """(remark on an answer on the axis of harm, whether the answer is good).

    The remark states the effect of the use next to the answer's action, so that a small model need not compare distant words.
    """
    helps = answer.stance == "help"
    end = "good" if relation.good else "harm"
    good = helps == relation.good
    return f"It does {'help with' if helps else 'refuse'} {end}. {verdict(good)}", good


def refusal_remark(answer: Answer) -> tuple[str, bool]:
    """(remark on an answer on the axis of refusals, whether the answer is good)."""
    found = {"help": "does not refuse", "refuse": "gives a reason", "evade": "dodges"}[answer.stance]
    return f"It {found}. {verdict(answer.stance != 'evade')}", answer.stance != "evade"


def _courtesy(answer: Answer) -> str:
    if answer.rude:
        return f"It begins: {answer.rude} It is rude. {BAD}"
    return f"It begins: {' '.join(answer.core.split()[:2]).rstrip(',')}. It is polite. {GOOD}"


def _focus(answer: Answer) -> str:
    if answer.ramble:
        return f"It ends: {answer.ramble} It is off the point. {BAD}"
    return f"It ends: {' '.join(answer.core.rstrip('.').split()[-2:])}. It is to the point. {GOOD}"
