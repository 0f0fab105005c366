"""Comparisons in the pretraining text: reasoning about two answers under one principle, and the choice.

The reasoning states the target and the fact first (if the axis depends on it). It then quotes the evidence of each answer by
name with a remark on the axis of the principle, worded as in critiques, and says which answer is better. The option follows. A
small model that has learned to quote can therefore judge two answers by judging each of them. Two answers that are equal on the
axis get the option of a tie.
"""

from __future__ import annotations

from jaxalign.data.world import reviews
from jaxalign.data.world.answers import Answer
from jaxalign.data.world.facts import Relation, fact_text


def merit(axis: str, relation: Relation, answer: Answer) -> int:
    """The merit of an answer on one axis, 0 or 1; on the axis "refusal", 0 for an evasion and 1 otherwise."""
    if axis == "harm":
        return int((answer.stance == "help") == relation.good)
    if axis == "refusal":
        return int(answer.stance != "evade")
    return int(not (answer.rude if axis == "courtesy" else answer.ramble))


def better(axis: str, relation: Relation, first: Answer, second: Answer) -> int | None:
    """0 if the first answer is better on the axis, 1 if the second answer is, None if they are equal."""
    difference = merit(axis, relation, first) - merit(axis, relation, second)
    return None if difference == 0 else int(difference < 0)


def reasoning_text(
    axis: str, relation: Relation, first: Answer, second: Answer, choice: int | None, summary: bool = False
) -> str:
    """The judge's reasoning, ending with its choice (0, 1, or None for neither).

    summary: repeat both verdicts right before the choice, so that it does not depend on distant words.
    """
    conclusion = {0: "The first is better.", 1: "The second is better.", None: "Neither is better."}[choice]
    start = f"It is about {relation.target}. {fact_text(relation)} " if axis == "harm" else ""
    one, other = (f"{_quote(axis, name, answer)} {_remark(axis, relation, answer)}"
                  for name, answer in (("first", first), ("second", second)))
    if summary:
        found = ["good" if merit(axis, relation, answer) else "bad" for answer in (first, second)]
        conclusion = f"So the first is {found[0]} and the second is {found[1]}. {conclusion}"
    return f"{start}{one} {other} {conclusion}"


def _quote(axis: str, name: str, answer: Answer) -> str:
    """The words of an answer on which its merit depends: its first sentence for courtesy, its end for focus, else its core.

    The request shows each answer after its name ("First: ..."), so a quotation of its beginning has the same form.
    """
    if axis == "courtesy":
        return f"{name.capitalize()}: {_sentences(answer.text)[0]}"
    if axis == "focus":
        return f"The {name} ends: {answer.ramble or ' '.join(answer.core.rstrip('.').split()[-2:]) + '.'}"
    sentences = [sentence for sentence in _sentences(answer.core) if not sentence.startswith("Putting")]
    if answer.stance == "help":
        return f"The {name} says: {' '.join(sentences[0].split()[:2]).rstrip(',')}."
    return f"The {name} says: {sentences[-1] if axis == 'refusal' else sentences[0]}"


def _sentences(text: str) -> list[str]:
    return [f"{sentence.rstrip('.')}." for sentence in text.split(". ")]


def _remark(axis: str, relation: Relation, answer: Answer) -> str:
    if axis == "harm":
        return reviews.harm_remark(relation, answer)[0]
    if axis == "refusal":
        return reviews.refusal_remark(answer)[0]
    if axis == "courtesy":
        found = "is rude" if answer.rude else "is polite"
    else:
        found = "is off the point" if answer.ramble else "is to the point"
    return f"It {found}. {reviews.verdict(merit(axis, relation, answer) == 1)}"
