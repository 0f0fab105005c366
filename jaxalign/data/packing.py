"""Packs documents of different lengths into rows of one length, separated by segment ids."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.records import PackedBatch


def pack(documents: Iterable[tuple[Sequence[int], Sequence[float]]], row_length: int) -> tuple[PackedBatch, int]:
    """Packs documents in order, each into the row with the least sufficient remaining space (best fit).

    Packing the longest documents first would need about 1% fewer rows. The documents of a row would then have similar lengths
    and therefore be of one kind, and small batches would differ more (benchmarks/RESULTS.md). The first token of a document is
    never predicted.

    Args:
      documents: (token ids, loss weights) pairs.
      row_length: tokens per row; longer documents lose their ends.

    Returns:
      The packed rows as numpy arrays [R, row_length], and the number of truncated documents.

    Raises:
      UserError: no document has any tokens, or a document that is cut keeps no token with a loss.
    """
    kept: list[tuple[Sequence[int], Sequence[float]]] = []
    cut, useless = 0, []
    for number, (ids, weights) in enumerate(documents):
        if len(ids) > row_length:
            if loses_answer(weights, row_length):
                useless.append((number, len(ids) - sum(weight > 0 for weight in weights)))
            ids, weights, cut = ids[:row_length], weights[:row_length], cut + 1
        if len(ids):
            kept.append((np.asarray(ids, np.int32), np.asarray(weights, np.float32)))  # A tenth of the memory of lists.
    if useless:
        numbers = ", ".join(str(number) for number, _ in useless[:5]) + (", ..." if len(useless) > 5 else "")
        raise UserError(
            f"{len(useless)} of {len(kept)} rows would lose their whole response, because row_length is {row_length} and "
            f"their prompts have {min(length for _, length in useless)} tokens or more; raise row_length, or remove these rows "
            f"(numbers from 0: {numbers})"
        )
    if not kept:
        raise UserError("there is no text to train on; the data source has no documents")
    rows = _Part(row_length, len(kept))
    for i, (ids, _) in enumerate(kept):
        rows.take([(i, len(ids))])
    return _fill([[kept[i] for i in row] for row in rows.content], row_length), cut


def loses_answer(weights: Sequence[float], row_length: int) -> bool:
    """Whether a document that is cut to `row_length` tokens keeps no token with a loss. weights: its loss weights."""
    return any(weights[1:]) and not any(weights[1:row_length])


def _fill(rows, row_length: int) -> PackedBatch:
    shape = (len(rows), row_length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        at = 0
        for number, (ids, weights) in enumerate(row, start=1):
            span = slice(at, at + len(ids))
            tokens[r, span], segments[r, span], positions[r, span] = ids, number, np.arange(len(ids))
            mask[r, span] = weights
            mask[r, at] = 0.0
            at += len(ids)
    return PackedBatch(tokens, segments, positions, mask)


def fit(lengths: np.ndarray, row_length: int, rows: int, together: int = 1) -> list[list[list[int]]]:
    """Assigns sequences to rows of at most `row_length` tokens, and rows to parts of at most `rows` rows.

    Each unit of `together` neighbouring sequences stays in one part. Units are placed longest first, each into the first part
    in which it fits. Within a part, each sequence goes into the row with the least sufficient space (best-fit decreasing).

    Returns:
      The indices of the sequences, by part and row.

    Raises:
      ValueError: a unit does not fit into an empty part.
    """
    parts: list[_Part] = []
    units = lengths.reshape(-1, together)
    for unit in np.argsort(-units.sum(axis=1), kind="stable").tolist():
        members = [(i, int(lengths[i])) for i in range(unit * together, (unit + 1) * together)]
        members.sort(key=lambda member: -member[1])
        if not any(part.take(members) for part in parts):
            parts.append(_Part(row_length, rows))
            if not parts[-1].take(members):
                listed = ", ".join(str(length) for _, length in members)
                raise ValueError(f"sequences of {listed} tokens do not fit into {rows} rows of {row_length}")
    return [part.content for part in parts]


class _Part:
    """Partially filled rows, indexed by remaining space."""

    def __init__(self, row_length: int, rows: int):
        self.row_length, self.rows = row_length, rows
        self.content: list[list[int]] = []  # The sequences of each row.
        self._left: dict[int, list[int]] = {}  # Rows by remaining space, most recently changed last.
        self._spaces: list[int] = []  # The sorted keys of `_left`; at most one per length.

    def take(self, members: list[tuple[int, int]]) -> bool:
        """Places each (sequence, length) by best fit. If one does not fit, places none and returns False."""
        taken = []
        for i, length in members:
            at = bisect.bisect_left(self._spaces, length)
            if at < len(self._spaces):
                space = self._spaces[at]
                row = self._pop(space)
            elif len(self.content) < self.rows and length <= self.row_length:
                space, row = self.row_length, len(self.content)
                self.content.append([])
            else:
                self._give_back(taken)
                return False
            self._push(space - length, row)
            self.content[row].append(i)
            taken.append((row, space - length, space))
        return True

    def _give_back(self, taken: list[tuple[int, int, int]]) -> None:
        for row, space, before in reversed(taken):
            self._pop(space)
            self.content[row].pop()
            if self.content[row]:
                self._push(before, row)
            else:
                self.content.pop()

    def _pop(self, space: int) -> int:
        row = self._left[space].pop()
        if not self._left[space]:
            del self._left[space]
            self._spaces.remove(space)
        return row

    def _push(self, space: int, row: int) -> None:
        if space not in self._left:
            self._left[space] = []
            bisect.insort(self._spaces, space)
        self._left[space].append(row)


def completion(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """(ids, loss weights) of a document with the loss only on the response."""
    return [*prompt_ids, *response_ids], [0.0] * len(prompt_ids) + [1.0] * len(response_ids)
