"""The arrays of data that does not fit in memory: rows are read, encoded and built into arrays in windows.

An epoch reads blocks of neighbouring rows in shuffled order, since files are slow at single random rows. A window consists of
several blocks; its documents are shuffled, an `ArrayBuilder` makes their arrays, and the rows of the arrays are shuffled again.
These rows of all windows form one endless sequence, of which batch n takes the positions [n * batch, (n + 1) * batch). All of
this is a pure function of the data and the seed, so that a resumed run makes its window again. It needs only the number of
rows in the arrays of each earlier window, which `WindowNotes` record.
"""

from __future__ import annotations

import bisect
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from jaxalign.data.loader import RowsOnDemand
from jaxalign.data.packing import loses_answer, pack
from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.errors import UserError
from jaxalign.records import PackedBatch

_BLOCK = 1024
"""The largest number of neighbouring rows that are read together. Tables decode so many rows at a time."""
_BLOCKS = 16
"""The least number of blocks in a window of at least as many rows."""
_DOCUMENTS, _ROWS = 0, 1  # The streams that shuffle a window.

Document = tuple[Sequence[int], Sequence[float]]
"""Token ids and their loss weights."""


class ArrayBuilder(Protocol):
    """Makes the arrays of a window from its documents, which are the encoded rows of the data."""

    kind: type
    """The record of the arrays."""

    def fault(self, document: Any) -> str | None:
        """The reason for which a document is dropped; None keeps it."""

    def build(self, documents: Sequence[Any]) -> tuple[Any, int]:
        """(the record of numpy arrays in the order of the documents, the number of documents or sequences that were cut)."""

    def join(self, parts: Sequence[Any]) -> Any:
        """One batch of the rows of neighbouring windows. The shapes of all batches are equal."""


@dataclasses.dataclass(frozen=True)
class PackedRowBuilder:
    """Builds packed rows from `Document`s. row_length: tokens per row."""

    row_length: int
    kind = PackedBatch

    def fault(self, document: Document) -> str | None:
        """A document is dropped if it would lose its whole answer."""
        ids, weights = document
        return "no_answer_left" if len(ids) > self.row_length and loses_answer(weights, self.row_length) else None

    def build(self, documents: Sequence[Document]) -> tuple[PackedBatch, int]:
        return pack(documents, self.row_length)

    def join(self, parts: Sequence[PackedBatch]) -> PackedBatch:
        return concatenated(parts)


@dataclasses.dataclass(frozen=True)
class WindowOrder:
    """The order in which windows read rows.

    Attributes:
      rows: the number of rows.
      window: the maximum number of rows in a window.
      seed: the run's seed.
      stream: separates the shuffles of different uses of one seed (`jaxalign.streams.LOADERS`).
    """

    rows: int
    window: int
    seed: int
    stream: int

    def __post_init__(self):
        if self.rows < 1:
            raise UserError("there are no rows to train on; give a data set with at least one")

    @property
    def block(self) -> int:
        """The number of neighbouring rows in a block."""
        return max(1, min(_BLOCK, self.window // _BLOCKS))

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return -(-self._blocks // self._together)

    @property
    def _blocks(self) -> int:
        return -(-self.rows // self.block)

    @property
    def _together(self) -> int:
        return self.window // self.block

    def blocks_of(self, number: int) -> list[np.ndarray]:
        """The row numbers of each block of window `number`, counted through all epochs; in file order."""
        epoch, place = divmod(number, self.windows)
        order = _block_order(self, epoch)[place * self._together : (place + 1) * self._together]
        return [np.arange(b * self.block, min((b + 1) * self.block, self.rows)) for b in np.sort(order).tolist()]

    def shuffled(self, number: int, use: int, count: int) -> np.ndarray:
        """A permutation of `count` items of window `number`."""
        return np.random.default_rng([self.seed, self.stream, *divmod(number, self.windows), use]).permutation(count)


@functools.lru_cache(maxsize=2)
def _block_order(order: WindowOrder, epoch: int) -> np.ndarray:
    """The blocks of an epoch in shuffled order, cached because all windows of the epoch need it. Do not modify it."""
    return np.random.default_rng([order.seed, order.stream, epoch]).permutation(order._blocks)


@dataclasses.dataclass(frozen=True)
class WindowNotes:
    """The numbers of a window, as plain JSON values.

    Attributes:
      rows: rows read.
      answers: documents kept.
      packed_rows: packed rows; of pairs or judged answers, the rows of the arrays.
      held_out: rows that were held out.
      cut: documents or sequences that lost tokens.
      counts: for each reason for which rows were dropped or changed, their number.
      first: for each reason the numbers of the first `LISTED` rows; of broken rows [number, reason].
    """

    LISTED: ClassVar[int] = 10

    rows: int
    answers: int
    packed_rows: int
    held_out: int = 0
    cut: int = 0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    first: dict[str, list] = dataclasses.field(default_factory=dict)


class Read(NamedTuple):
    """What reading some rows gives.

    Attributes:
      documents: (number of the row, document) of the rows to train on.
      held_out: the rows that are held out.
      listed: for each reason, the rows that were dropped or changed.
    """

    documents: list[tuple[int, Any]]
    held_out: list[Any]
    listed: dict[str, list]


class Window(NamedTuple):
    """A window: its arrays (None if it has no documents), its held-out rows, and its numbers."""

    arrays: Any
    held_out: list[Any]
    notes: WindowNotes


class WindowedRows(RowsOnDemand):
    """The rows of the arrays of all windows, in an endless sequence of epochs.

    While a window is used, a thread makes the next one. Close the object to end the thread.

    Args:
      order: the order of the rows.
      read: reads the rows with some numbers.
      builder: makes the arrays.
      earlier: the notes of windows that an earlier process has used.
      on_window: called once for each window in order, those of `earlier` included, before its rows are used. It may raise.
      on_new: called after `on_window` for the windows that are not in `earlier`.
    """

    def __init__(
        self, order: WindowOrder, read: Callable[[Sequence[int]], Read], builder: ArrayBuilder, *,
        earlier: Iterable[WindowNotes] = (),
        on_window: Callable[[int, WindowNotes], None] | None = None, on_new: Callable[[WindowNotes], None] | None = None,
    ):
        self.order, self.builder = order, builder
        self._read, self._on_window, self._on_new = read, on_window, on_new
        self._ends: list[int] = []  # The number of rows up to the end of each window that was used.
        self._recorded: list[int] = []  # The rows of the windows in `earlier`.
        self._windows: dict[int, Future[Window]] = {}
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._pool = ThreadPoolExecutor(1, "window")
        for notes in earlier:
            self._append(notes)
            self._recorded.append(notes.packed_rows)

    def first(self) -> Window:
        """The first window. Raises UserError if it has no document to train on."""
        with self._lock:
            if not self._ends:
                self._meet()
            window = self._window(0)
            if not window.notes.packed_rows:
                raise UserError(f"none of the {window.notes.rows:,} rows of the first window can be trained on; give usable "
                                "rows, or raise the window")
            return window

    def steps(self, epochs: float, batch: int) -> int:
        """The number of batches in `epochs` epochs, at least 1. It is an estimate from the first window."""
        notes = self.first().notes
        return max(1, round(notes.packed_rows * self.order.rows * epochs / (notes.rows * batch)))

    @property
    def kind(self) -> type:
        return self.builder.kind

    def take(self, index: np.ndarray) -> Any:
        with self._lock:
            last = int(index[-1])
            while not self._ends or self._ends[-1] <= last:
                self._meet()
            numbers = [bisect.bisect_right(self._ends, position) for position in index.tolist()]
            for number in [number for number in self._windows if number < numbers[0]]:
                del self._windows[number]
            parts = []
            for number in dict.fromkeys(numbers):
                start = self._ends[number - 1] if number else 0
                inside = [position - start for position, own in zip(index.tolist(), numbers, strict=True) if own == number]
                parts.append(jax.tree.map(lambda x, inside=inside: x[inside], self._window(number).arrays))
            self._submit(numbers[-1] + 1)
            return self.builder.join(parts)

    def close(self) -> None:
        """Ends the thread. A window that it is making is given up."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _meet(self) -> None:
        """Makes the next window of the sequence and counts its rows."""
        notes = self._window(len(self._ends)).notes
        self._append(notes)
        if self._on_new:
            self._on_new(notes)

    def _append(self, notes: WindowNotes) -> None:
        if self._on_window:
            self._on_window(len(self._ends), notes)
        self._ends.append((self._ends[-1] if self._ends else 0) + notes.packed_rows)

    def _window(self, number: int) -> Window:
        self._submit(number)
        window = self._windows[number].result()
        if number < len(self._recorded) and window.notes.packed_rows != self._recorded[number]:
            raise UserError(f"window {number} of the data has {window.notes.packed_rows} rows to train on, but had "
                            f"{self._recorded[number]} in the interrupted run; train on the same data, or begin again")
        return window

    def _submit(self, number: int) -> None:
        if number not in self._windows:
            self._windows[number] = self._pool.submit(contextvars.copy_context().run, self._make, number)

    def _make(self, number: int) -> Window:
        documents, held_out, listed, rows = [], [], {}, 0
        for block in self.order.blocks_of(number):
            if self._closed.is_set():
                raise RuntimeError("the rows were closed")
            part = self._read(block.tolist())
            rows += len(block)
            held_out += part.held_out
            for row, document in part.documents:
                if fault := self.builder.fault(document):
                    part.listed.setdefault(fault, []).append(row)
                else:
                    documents.append(document)
            for reason, places in part.listed.items():
                listed.setdefault(reason, []).extend(places)
        arrays, cut, size = None, 0, 0
        if documents:
            order = self.order.shuffled(number, _DOCUMENTS, len(documents))
            arrays, cut = self.builder.build([documents[i] for i in order])
            size = len(jax.tree.leaves(arrays)[0])
            order = self.order.shuffled(number, _ROWS, size)
            arrays = jax.tree.map(lambda x: x[order], arrays)
        return Window(arrays, held_out, WindowNotes(rows, len(documents), size, len(held_out), cut, *noted(listed)))


def noted(listed: Mapping[str, Sequence]) -> tuple[dict[str, int], dict[str, list]]:
    """The `counts` and `first` of `WindowNotes` from the rows of each reason."""
    counts = {reason: len(places) for reason, places in listed.items() if places}
    return counts, {reason: [[place.line, place.reason] if isinstance(place, BrokenLine) else place
                             for place in listed[reason][: WindowNotes.LISTED]] for reason in counts}


def concatenated(parts: Sequence[Any]) -> Any:
    """The rows of several records of arrays, one after another."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)
