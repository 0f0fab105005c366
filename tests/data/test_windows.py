"""Packed rows of windows: each row once in an epoch, in an order that depends on the seed, and the same after a resume."""

from __future__ import annotations

import collections
import contextlib
import threading

import numpy as np
import pytest

from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.data.windows import PackedRowBuilder, Read, WindowedRows, WindowOrder
from jaxalign.errors import UserError

ROWS, LENGTH = 100, 12


def document(number):
    """The number of a row, repeated: one prompt token and 1 to 4 tokens of the answer."""
    size = 2 + number % 4
    return [number + 1] * size, [0.0] + [1.0] * (size - 1)


def read(index):
    """Every tenth row is broken."""
    listed = {"broken": [BrokenLine(i, "bad") for i in index if i % 10 == 9], "cut": []}
    return Read([(i, document(i)) for i in index if i % 10 != 9], [], listed)


def rows_of(window, seed=0, **options):
    return contextlib.closing(WindowedRows(WindowOrder(ROWS, window, seed, 3), read, PackedRowBuilder(LENGTH), **options))


def taken(rows, first, last):
    return rows.take(np.arange(first, last))


@pytest.mark.parametrize(("rows", "window"), [(400, 64), (10, 3), (1, 5), (1000, 1000), (5000, 2048), (10, 1)])
def test_the_windows_of_an_epoch_have_every_row_once(rows, window):
    order = WindowOrder(rows, window, 0, 3)
    epochs = []
    for epoch in range(2):
        windows = [np.concatenate(order.blocks_of(epoch * order.windows + n)) for n in range(order.windows)]
        assert max(map(len, windows)) <= window
        epochs.append(np.concatenate(windows).tolist())
        assert sorted(epochs[-1]) == list(range(rows))
    assert order.windows < 4 or epochs[0] != epochs[1]


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
def test_the_batches_of_an_epoch_have_every_document_once(window):
    notes = []
    with rows_of(window, on_window=lambda number, noted: notes.append((number, noted))) as rows:
        order = rows.order
        while len(notes) < order.windows:
            taken(rows, 0, sum(noted.packed_rows for _, noted in notes) + 1)
        batch = taken(rows, 0, sum(noted.packed_rows for _, noted in notes[: order.windows]))
    assert [number for number, _ in notes] == list(range(len(notes)))
    counts = collections.Counter(batch.tokens[batch.tokens > 0].tolist())
    assert counts == {i + 1: 2 + i % 4 for i in range(ROWS) if i % 10 != 9}
    assert batch.loss_mask.sum() == sum(1 + i % 4 for i in range(ROWS) if i % 10 != 9)
    epoch = [noted for _, noted in notes[: order.windows]]
    assert sum(noted.rows for noted in epoch) == ROWS and sum(noted.answers for noted in epoch) == 90
    assert sum(noted.counts.get("broken", 0) for noted in epoch) == 10
    assert sorted(line for noted in epoch for line, _ in noted.first.get("broken", ())) == list(range(9, 100, 10))


def test_a_later_process_needs_only_the_notes_of_earlier_windows():
    """It reads the rows of the window of its step, not those of the windows before."""
    notes, numbers = [], []
    with rows_of(16, on_new=notes.append) as rows:
        whole = taken(rows, 0, 60)

    def counting(index):
        numbers.extend(index)
        return read(index)

    order = WindowOrder(ROWS, 16, 0, 3)
    with contextlib.closing(WindowedRows(order, counting, PackedRowBuilder(LENGTH), earlier=notes)) as rows:
        position = sum(noted.packed_rows for noted in notes[:5]) + 1
        batch = taken(rows, position, position + 2)
    np.testing.assert_array_equal(batch.tokens, whole.tokens[position : position + 2])
    early = {int(i) for n in range(5) for block in order.blocks_of(n) for i in block}
    assert early.isdisjoint(numbers)


def test_the_order_depends_on_the_seed_and_not_on_how_rows_are_taken():
    with rows_of(16) as rows, rows_of(16) as again, rows_of(16, seed=1) as other:
        whole = taken(rows, 0, 40).tokens
        single = [taken(again, i, i + 1).tokens for i in range(40)]
        np.testing.assert_array_equal(np.concatenate(single), whole)
        assert (taken(other, 0, 40).tokens != whole).any()


def test_changed_data_is_refused_when_a_run_resumes():
    notes = []
    with rows_of(16, on_new=notes.append) as rows:
        taken(rows, 0, 20)
    order = WindowOrder(ROWS, 16, 0, 3)
    fewer = WindowedRows(order, lambda index: Read(read(index).documents * 3, [], {}), PackedRowBuilder(LENGTH), earlier=notes)
    with contextlib.closing(fewer) as rows, pytest.raises(UserError, match="window 0 of .* rows to train on, but had"):
        rows.first()


def test_a_row_whose_answer_is_cut_away_is_dropped_and_listed():
    def long(index):
        return Read([(i, ([1] * 20, [0.0] * 15 + [1.0] * 5) if i == 3 else document(i)) for i in index], [], {})

    with contextlib.closing(WindowedRows(WindowOrder(8, 8, 0, 3), long, PackedRowBuilder(LENGTH))) as rows:
        notes = rows.first().notes
    assert notes.counts == {"no_answer_left": 1} and notes.first == {"no_answer_left": [3]}
    assert (notes.answers, notes.rows, notes.cut) == (7, 8, 0)


def test_errors_of_the_next_window_wait_until_it_is_used():
    def failing(index):
        if 7 in index:
            raise UserError("row 7 is damaged")
        return read(index)

    order = next(order for seed in range(99) if 7 not in np.concatenate((order := WindowOrder(20, 5, seed, 3)).blocks_of(0)))
    with contextlib.closing(WindowedRows(order, failing, PackedRowBuilder(LENGTH))) as rows:
        assert len(taken(rows, 0, 1).tokens) == 1
        with pytest.raises(UserError, match="row 7 is damaged"):
            taken(rows, 0, 20)
    assert not any(thread.name.startswith("window") for thread in threading.enumerate())
