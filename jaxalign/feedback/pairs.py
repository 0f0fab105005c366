"""Chooses two of several answers to one prompt for a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxalign.feedback.critique import PolicyAnswer


def choose_pair(answers: Sequence[PolicyAnswer], how: str) -> tuple[int, int] | None:
    """The indices of two answers, in ascending order; equal answers are chosen only if all are equal.

    Args:
      answers: at least two answers to one prompt.
      how: "first": the first two that differ; "different": the two with the smallest Jaccard similarity of their words and
        pairs of neighbouring words; "uncertain": the two with the lowest mean log-probability per token. Among equals, the
        earliest pair.

    Returns:
      Two indices; None if fewer than two answers could be sampled.
    """
    sampled = [i for i, answer in enumerate(answers) if answer.sampled]
    if len(sampled) < 2:
        return None
    pairs = list(itertools.combinations(sampled, 2))
    differing = [pair for pair in pairs if answers[pair[0]].text != answers[pair[1]].text]
    if not differing:
        return pairs[0]
    if how == "different":
        parts = {}
        for i in sampled:
            words = answers[i].text.lower().split()
            parts[i] = {(word,) for word in words} | set(itertools.pairwise(words))
        similarity = {}
        for a, b in differing:
            union = parts[a] | parts[b]
            similarity[a, b] = len(parts[a] & parts[b]) / len(union) if union else 1.0
        return min(differing, key=similarity.get)
    if how == "uncertain":
        return min(differing, key=lambda pair: answers[pair[0]].mean_logprob + answers[pair[1]].mean_logprob)
    return differing[0]
