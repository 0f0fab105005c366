"""Measures of the words of texts: repetition and diversity.

Words are the parts between white space, as written. For languages without spaces between words the measures say little.
"""

from __future__ import annotations

from collections.abc import Sequence

REPEATED = 4
"""The n of the repeated n-grams."""


def repetition(text: str, n: int = REPEATED) -> float | None:
    """The share of the n-grams of a text that repeat an earlier one (seq-rep-n, Welleck et al. 2019, arXiv 1908.04319).

    Returns:
      1 - distinct n-grams / n-grams, in 0..1; None for a text of fewer than n words.
    """
    grams = _ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def distinct(texts: Sequence[str], n: int) -> float | None:
    """The number of distinct n-grams in all texts together, divided by the number of words (Li et al. 2015, arXiv 1510.03055).

    It falls with the number of words, so only texts of similar total length can be compared.

    Returns:
      A number in 0..1; None without a word.
    """
    words = sum(len(text.split()) for text in texts)
    return len({gram for text in texts for gram in _ngrams(text, n)}) / words if words else None


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
