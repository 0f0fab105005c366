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


def fit(lengths: np.ndarray, row_length: int, rows: int, together: int = 1) -> list[list[list[int]]]:
    """Sequence numbers by part and by row of it, where at most `rows` rows of a part may each hold row_length in sum.

    Units of `together` neighbouring sequences come into one part; the longest first, each into the first part that has room,
    there each sequence where the least is left (best-fit decreasing). No length may be above row_length.
    """
    parts: list[tuple[list[list[int]], list[tuple[int, int]]]] = []  # (rows, what is left of each with its number, sorted)
    units = lengths.reshape(-1, together)
    for unit in np.argsort(-units.sum(axis=1), kind="stable").tolist():
        members = sorted(range(unit * together, (unit + 1) * together), key=lambda i: -lengths[i])
        tried = ((content, _room(room, lengths, members, row_length, rows)) for content, room in parts)
        content, where = next((found for found in tried if found[1] is not None), (None, None))
        if content is None:
            parts.append((content := [], room := []))
            where = _room(room, lengths, members, row_length, rows)
        for i, row in zip(members, where, strict=True):
            content.extend([] for _ in range(len(content), row + 1))
            content[row].append(i)
    return [content for content, _ in parts]


def _room(room: list[tuple[int, int]], lengths, members: list[int], row_length: int, rows: int) -> list[int] | None:
    """The row of each member, whose place is then taken; None where they do not all fit."""
    left, where = list(room) if len(members) > 1 else room, []
    for i in members:
        at = bisect.bisect_left(left, (lengths[i], -1))
        if at < len(left):
            free, row = left.pop(at)
        elif len(left) < rows:
            free, row = row_length, len(left)
        else:
            return None
        bisect.insort(left, (free - lengths[i], row))
        where.append(row)
    room[:] = left
    return where


def completion(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """A document whose loss is on the response alone."""
    return [*prompt_ids, *response_ids], [0.0] * len(prompt_ids) + [1.0] * len(response_ids)
