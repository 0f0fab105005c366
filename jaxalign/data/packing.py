"""Packing documents of unequal length into rows of one length, told apart by segment ids."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.records import PackedBatch

OPEN_ROWS = 64  # How many unfinished rows first-fit looks at; older ones are closed.


def pack(documents: Iterable[tuple[Sequence[int], Sequence[float]]], row_length: int) -> tuple[PackedBatch, int]:
    """Packs (token ids, loss weights) pairs, first fit, in order. Returns numpy arrays [R, row_length] and a count.

    The first token of a document is never predicted (nothing stands before it). Documents longer than a row are cut at
    its end; the count says how many. Raises UserError when there is no document.
    """
    rows: list[list[tuple[Sequence[int], Sequence[float]]]] = []
    room: list[int] = []
    cut = 0
    for ids, weights in documents:
        if len(ids) > row_length:
            ids, weights, cut = ids[:row_length], weights[:row_length], cut + 1
        for row in range(max(0, len(rows) - OPEN_ROWS), len(rows)):
            if room[row] >= len(ids):
                break
        else:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append((ids, weights))
        room[row] -= len(ids)
    if not rows:
        raise UserError("there is no text to train on; the data source gave no document")
    return _fill(rows, row_length), cut


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


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of sequence numbers, each at most `row_length` long in sum: the longest first, each where the least room is left.

    Needs at most 11/9 of the fewest rows there can be, and one more (best-fit decreasing). No length may be above row_length.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(room, (lengths[i], -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = row_length, len(rows)
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (left - lengths[i], row))
    return rows


def completion(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """A document whose loss is on the response alone."""
    return [*prompt_ids, *response_ids], [0.0] * len(prompt_ids) + [1.0] * len(response_ids)
