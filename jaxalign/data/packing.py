"""Packing documents of unequal length into rows of one length, told apart by segment ids."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.records import PackedBatch


def pack(documents: Iterable[tuple[Sequence[int], Sequence[float]]], row_length: int) -> tuple[PackedBatch, int]:
    """Packs (token ids, loss weights) pairs in their order, each where the least room is left of all rows (best fit). Returns
    numpy arrays [R, row_length] and a count.

    Longest first would need about 1% fewer rows, but rows would hold documents of one length, and so of one kind, and small
    batches be less alike (benchmarks/RESULTS.md). The first token of a document is never predicted (nothing stands before it).
    Documents longer than a row are cut at its end; the count says how many. Raises UserError when there is no document, or none
    with a token.
    """
    kept: list[tuple[Sequence[int], Sequence[float]]] = []
    cut = 0
    for ids, weights in documents:
        if len(ids) > row_length:
            ids, weights, cut = ids[:row_length], weights[:row_length], cut + 1
        if len(ids):
            kept.append((ids, weights))
    if not kept:
        raise UserError("there is no text to train on; the data source gave no document")
    rows = _Part(row_length, len(kept))
    for i, (ids, _) in enumerate(kept):
        rows.take([(i, len(ids))])
    return _fill([[kept[i] for i in row] for row in rows.content], row_length), cut


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
    """Sequence numbers by part and by row of it, where at most `rows` rows of a part may each hold row_length in sum.

    Units of `together` neighbouring sequences come into one part; the longest first, each into the first part that has room,
    there each sequence where the least is left (best-fit decreasing). Raises ValueError where a unit does not fit an
    empty part.
    """
    parts: list[_Part] = []
    units = lengths.reshape(-1, together)
    for unit in np.argsort(-units.sum(axis=1), kind="stable").tolist():
        members = [(i, int(lengths[i])) for i in range(unit * together, (unit + 1) * together)]
        members.sort(key=lambda member: -member[1])
        if not any(part.take(members) for part in parts):
            parts.append(_Part(row_length, rows))
            if not parts[-1].take(members):
                told = ", ".join(str(length) for _, length in members)
                raise ValueError(f"sequences of {told} tokens do not fit into {rows} rows of {row_length}")
    return [part.content for part in parts]


class _Part:
    """Rows that fill up, each found by the room left in it."""

    def __init__(self, row_length: int, rows: int):
        self.row_length, self.rows = row_length, rows
        self.content: list[list[int]] = []  # The sequences of each row.
        self._left: dict[int, list[int]] = {}  # The rows with that much room left, the one last changed at the end,
        self._rooms: list[int] = []  # and the keys, sorted: no more than there are lengths, however many rows.

    def take(self, members: list[tuple[int, int]]) -> bool:
        """Finds a row for each of (sequence, length), where the least room is left; False, and none taken, if not for all."""
        taken = []
        for i, length in members:
            at = bisect.bisect_left(self._rooms, length)
            if at < len(self._rooms):
                room = self._rooms[at]
                row = self._pop(room)
            elif len(self.content) < self.rows and length <= self.row_length:
                room, row = self.row_length, len(self.content)
                self.content.append([])
            else:
                self._give_back(taken)
                return False
            self._push(room - length, row)
            self.content[row].append(i)
            taken.append((row, room - length, room))
        return True

    def _give_back(self, taken: list[tuple[int, int, int]]) -> None:
        for row, room, before in reversed(taken):
            self._pop(room)
            self.content[row].pop()
            if self.content[row]:
                self._push(before, row)
            else:
                self.content.pop()

    def _pop(self, room: int) -> int:
        row = self._left[room].pop()
        if not self._left[room]:
            del self._left[room]
            self._rooms.remove(room)
        return row

    def _push(self, room: int, row: int) -> None:
        if room not in self._left:
            self._left[room] = []
            bisect.insort(self._rooms, room)
        self._left[room].append(row)


def completion(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """A document whose loss is on the response alone."""
    return [*prompt_ids, *response_ids], [0.0] * len(prompt_ids) + [1.0] * len(response_ids)
