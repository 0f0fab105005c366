"""Chooses two of several answers to one prompt for a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxalign.feedback.critique import Answer


def choose_pair(answers: Sequence[Answer], how: str) -> tuple[int, int] | None:
    """The indices of two answers, in ascending order; equal answers are chosen only if all are equal.

    Args:
      answers: at least two answers to one prompt.
      how: "first": the first two that differ; "different": the two with the smallest Jaccard similarity of their words and
        pairs of neighbouring words; "uncertain": the two with the lowest mean log-probability per token. Among equals, the
        earliest pair.

    Returns:
      Two indices; None if fewer than two answers could be sampled.
    """
    sampled = [i for i, found in enumerate(answers) if found.sampled]
    if len(sampled) < 2:
        return None
    pairs = list(itertools.combinations(sampled, 2))
    differing = [pair for pair in pairs if answers[pair[0]].text != answers[pair[1]].text]
    if not differing:
        return pairs[0]
    if how == "different":
        words = {i: _word_set(answers[i].text) for i in sampled}
        return min(differing, key=lambda pair: _similarity(words[pair[0]], words[pair[1]]))
    if how == "uncertain":
        return min(differing, key=lambda pair: answers[pair[0]].mean_logprob + answers[pair[1]].mean_logprob)
    return differing[0]


def _word_set(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {(word,) for word in words} | set(itertools.pairwise(words))


def _similarity(a: set, b: set) -> float:
    """The Jaccard similarity of two sets; 1 if both are empty."""
    return len(a & b) / len(a | b) if a or b else 1.0
