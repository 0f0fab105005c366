"""Repetition and diversity of texts, as sequences of tokens or of words."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def repeated_share(parts: Sequence[Hashable], n: int = 4) -> float:
    """The share of the n-grams of a sequence that occur earlier in it (seq-rep-n of Welleck et al. 2019, arXiv 1908.04319).

    Args:
      parts: the tokens or words of a text.
      n: the length of the n-grams.

    Returns:
      1 - distinct n-grams / n-grams, in 0..1; 0 if the sequence is shorter than n.
    """
    grams = _ngrams(parts, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_share(texts: Sequence[Sequence[Hashable]], n: int) -> float | None:
    """distinct-n of Li et al. 2015 (arXiv 1510.03055): the distinct n-grams of all texts, divided by the number of their parts.

    It falls with the number of parts, so it compares only texts of similar total length.

    Args:
      texts: the tokens or words of each text.
      n: the length of the n-grams.

    Returns:
      A number in 0..1; None if all texts are empty.
    """
    total = sum(len(parts) for parts in texts)
    return len({gram for parts in texts for gram in _ngrams(parts, n)}) / total if total else None


def _ngrams(parts: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
