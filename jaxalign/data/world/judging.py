"""Comparisons in the pretraining text: reasoning about two answers under one principle, and the choice.

The reasoning states the target and the fact first (if the axis depends on it). It then quotes the evidence of each answer by
name with a remark on the axis of the principle, worded as in critiques, and says which answer is better. The option follows. A
small model that has learned to quote can therefore judge two answers by judging each of them. Two answers that are equal on the
axis get the option of a tie.
"""

from __future__ import annotations

from jaxalign.data.world import reviews
from jaxalign.data.world.answers import WorldAnswer
from jaxalign.data.world.facts import Relation, fact_text


def reasoning_text(
    axis: str, relation: Relation, first: WorldAnswer, second: WorldAnswer, choice: int | None, summary: bool = False
) -> str:
    """The judge's reasoning, ending with its choice (0, 1, or None for neither).

    summary: repeat both verdicts right before the choice, so that it does not depend on distant words.
    """
    conclusion = {0: "The first is better.", 1: "The second is better.", None: "Neither is better."}[choice]
    start = f"It is about {relation.target}. {fact_text(relation)} " if axis == "harm" else ""
    one, other = (f"{_quote(axis, name, answer)} {reviews.remark(axis, relation, answer)}"
                  for name, answer in (("first", first), ("second", second)))
    if summary:
        one_is, other_is = ("good" if reviews.is_good(axis, relation, answer) else "bad" for answer in (first, second))
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
