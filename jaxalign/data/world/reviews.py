"""Critiques and revisions in the pretraining text: one answer reviewed under one principle; and the reasoning of comparisons.

A critique quotes its evidence (the fact, the rude words, the rambling) before its conclusion. A revision corrects the answer
only on the axis of the principle and repeats the rest unchanged.

The reasoning of a comparison states the target and the fact first (if the axis depends on it). It then quotes the evidence of
each answer by name with a remark on the axis of the principle, worded as in critiques, and says which answer is better. The
option follows. A small model that has learned to quote can therefore judge two answers by judging each of them. Two answers
that are equal on the axis get the option of a tie.
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


def reasoning_text(
    axis: str, relation: Relation, first: WorldAnswer, second: WorldAnswer, choice: int | None, summary: bool = False
) -> str:
    """The judge's reasoning, ending with its choice (0, 1, or None for neither).

    summary: repeat both verdicts right before the choice, so that it does not depend on distant words.
    """
    conclusion = {0: "The first is better.", 1: "The second is better.", None: "Neither is better."}[choice]
    start = f"It is about {relation.target}. {fact_text(relation)} " if axis == "harm" else ""
    one, other = (f"{_quote(axis, name, answer)} {remark(axis, relation, answer)}"
                  for name, answer in (("first", first), ("second", second)))
    if summary:
        one_is, other_is = ("good" if is_good(axis, relation, answer) else "bad" for answer in (first, second))
        conclusion = f"So the first is {one_is} and the second is {other_is}. {conclusion}"
    return f"{start}{one} {other} {conclusion}"


def _quote(axis: str, name: str, answer: WorldAnswer) -> str:
    """The words of an answer on which its verdict depends: its first sentence for courtesy, its end for focus, else its core.

    The request shows each answer after its name ("First: ..."), so a quotation of its beginning has the same form.
    """
    if axis == "courtesy":
        return f"{name.capitalize()}: {answer.text.split('. ')[0].rstrip('.')}."
    if axis == "focus":
        return f"The {name} ends: {answer.ramble or ' '.join(answer.core.rstrip('.').split()[-2:]) + '.'}"
    sentences = [f"{sentence.rstrip('.')}." for sentence in answer.core.split(". ")]
    sentences = [sentence for sentence in sentences if not sentence.startswith("Putting")]
    if answer.stance == "help":
        return f"The {name} says: {' '.join(sentences[0].split()[:2]).rstrip(',')}."
    return f"The {name} says: {sentences[-1] if axis == 'refusal' else sentences[0]}"
