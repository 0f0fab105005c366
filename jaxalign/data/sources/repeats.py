"""Finds rows that repeat or contradict an earlier row, by 64-bit hashes of their text."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.records import Comparison, Demonstration, Judgement

_MOST = 1_000_000
"""The number of rows of a file that are compared; they need 16 MB."""


class RepeatedRows:
    """The numbers of rows with the text of an earlier row, among the first million rows."""

    def __init__(self):
        self._digests, self._lines = array.array("Q"), array.array("q")

    def add(self, line: int, record: Comparison | Demonstration | Judgement) -> None:
        """Adds the record of a row."""
        if len(self._digests) < _MOST:
            self._digests.append(_digest(record))
            self._lines.append(line)

    def listed(self) -> dict[str, list[int]]:
        """"repeated": the rows that repeat an earlier row. "contradicted": the rows with the opposite label of an earlier row,
        which is the first with their text. Both in the order in which the rows were added."""
        lines, digests = np.asarray(self._lines, np.int64), np.asarray(self._digests, np.uint64)
        texts, labels = digests >> np.uint64(1), digests & np.uint64(1)
        _, first, number = np.unique(texts, return_index=True, return_inverse=True)
        opposite = labels != labels[first[number]]
        return {"repeated": np.delete(lines, _first_rows(digests)).tolist(), "contradicted": lines[opposite].tolist()}


def distinct_pairs(pairs: Sequence[Comparison]) -> Sequence[Comparison]:
    """The pairs without those that repeat the dialogue, the answers and the label of an earlier pair."""
    hashes = (_hash((_digest(pair), pair.label)) for pair in pairs)
    first = _first_rows(np.fromiter(hashes, np.uint64, len(pairs)))
    if len(first) == len(pairs):
        return pairs
    return pairs.take(first) if isinstance(pairs, LazyRecords) else [pairs[row] for row in first]


def _digest(record: Comparison | Demonstration | Judgement) -> int:
    """A hash of the dialogue and of the answers in either order, whose lowest bit is the label."""
    messages = record.prompt.messages
    if isinstance(record, Comparison):
        answers = sorted((record.response_a, record.response_b))
        return _hash((messages, answers)) & ~1 | (record.response_a == answers[0])
    return _hash((messages, record.response)) & ~1 | (isinstance(record, Judgement) and record.desirable)


def _hash(content: object) -> int:
    """The first 64 bits of a hash of a value's `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _first_rows(digests: np.ndarray) -> np.ndarray:
    """The indices of the rows whose digest no earlier row has, in ascending order."""
    return np.sort(np.unique(digests, return_index=True)[1])
