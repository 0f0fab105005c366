"""Comparisons: what the pretraining text shows about choosing between two answers under one principle, with reasons.

The reasoning recites the fact first, then says what each answer does on the principle's axis, then which is better;
the option follows. Two answers that are equal on the axis get either option at random, so that a model which has learnt
this gives them even odds.
"""

from __future__ import annotations

from jaxalign.data.world.answers import Answer
from jaxalign.data.world.facts import Relation, fact_text


def merit(axis: str, relation: Relation, answer: Answer) -> int:
    """How good an answer is on one axis: 1 or 0 (on "refusal" a dodge is 0 and all else 1)."""
    if axis == "harm":
        return int((answer.stance == "help") == relation.good)
    if axis == "refusal":
        return int(answer.stance != "evade")
    return int(not (answer.rude if axis == "courtesy" else answer.ramble))


def better(axis: str, relation: Relation, first: Answer, second: Answer) -> int | None:
    """0 if the first answer is better on the axis, 1 if the second is, None if they are equal."""
    difference = merit(axis, relation, first) - merit(axis, relation, second)
    return None if difference == 0 else int(difference < 0)


def reasoning_text(axis: str, relation: Relation, first: Answer, second: Answer, choice: int | None) -> str:
    """The judge's reasons, ending with its choice (0, 1, or None for neither)."""
    verdict = {0: "The first is better.", 1: "The second is better.", None: "Neither is better."}[choice]
    start = f"{fact_text(relation)} One should {'help' if relation.good else 'refuse'}. " if axis == "harm" else ""
    return f"{start}The first {_remark(axis, first)}. The second {_remark(axis, second)}. {verdict}"


def _remark(axis: str, answer: Answer) -> str:
    if axis == "harm":
        return "does help" if answer.stance == "help" else "does refuse"
    if axis == "refusal":
        return {"help": "does help", "refuse": "does refuse with a reason", "evade": "does dodge"}[answer.stance]
    if axis == "courtesy":
        opening = answer.rude.rstrip(".") or " ".join(answer.core.split()[:2]).rstrip(",")
        return f"begins: {opening}. That is {'rude' if answer.rude else 'polite'}"
    ending = " ".join((answer.ramble or answer.core).rstrip(".").split()[-2:])
    return f"ends: {ending}. That is {'off' if answer.ramble else 'to'} the point"
