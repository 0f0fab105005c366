"""Finds rows that repeat an earlier row, by 64-bit hashes of their text."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.records import Comparison

_MOST = 1_000_000
"""The number of rows of a file that are compared; they need 16 MB."""


class RepeatedRows:
    """The numbers of rows whose content equals that of an earlier row, among the first million rows."""

    def __init__(self):
        self._digests, self._lines = array.array("Q"), array.array("q")

    def add(self, line: int, content: object) -> None:
        """Adds a row. content: a value whose `repr` is its text."""
        if len(self._digests) < _MOST:
            self._digests.append(_digest(content))
            self._lines.append(line)

    def lines(self) -> list[int]:
        """The numbers of the rows that repeat an earlier row, in the order in which they were added."""
        lines = np.asarray(self._lines, np.int64)
        first = _first_rows(np.asarray(self._digests, np.uint64))
        return np.delete(lines, first).tolist()


def distinct_pairs(pairs: Sequence[Comparison]) -> Sequence[Comparison]:
    """The pairs without those that repeat the dialogue, the answers and the label of an earlier pair."""
    contents = ((pair.prompt.messages, pair.response_a, pair.response_b, pair.label) for pair in pairs)
    first = _first_rows(np.fromiter(map(_digest, contents), np.uint64, len(pairs)))
    if len(first) == len(pairs):
        return pairs
    return pairs.take(first) if isinstance(pairs, LazyRecords) else [pairs[row] for row in first]


def _digest(content: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _first_rows(digests: np.ndarray) -> np.ndarray:
    """The indices of the rows whose digest no earlier row has, in ascending order."""
    return np.sort(np.unique(digests, return_index=True)[1])
