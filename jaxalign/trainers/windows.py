"""The windows of a training run: their numbers in its directory, and those of rows that are given to `fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxalign.data.windows import ArrayBuilder, Read, WindowedRows, WindowNotes, WindowOrder
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.steps.early_stopping import EarlyStopping
from jaxalign.steps.loop import Step
from jaxalign.tracking.jsonl import open_append, read_rows
from jaxalign.trainers.base import Trainer
from jaxalign.trainers.data_frames import without_frame
from jaxalign.trainers.extent import warn_of_cut

IDENTIFYING_ROWS = 100
"""The first rows whose tokens identify the data of a run in windows."""
FILE = "windows.jsonl"
"""The numbers of the windows that a run has used (`data.windows.WindowNotes`), from which an interrupted run knows the place of
its step."""


def windowed_rows(
    order: WindowOrder, read: Callable[[Sequence[int]], Read], builder: ArrayBuilder, directory: Path | None,
    on_window: Callable[[int, WindowNotes], None] | None = None,
) -> WindowedRows:
    """The rows of windows, whose numbers are kept in the directory of the run.

    Args:
      order, read, builder, on_window: as in `WindowedRows`.
      directory: the directory of the run; None for a run in memory.

    Raises:
      UserError: the file of the windows is damaged.
    """
    if directory is None:
        return WindowedRows(order, read, builder, on_window=on_window)
    path = directory / FILE

    def record(notes: WindowNotes) -> None:
        if hosts.is_first():
            with open_append(path) as file:
                file.write(json.dumps(dataclasses.asdict(notes)) + "\n")

    try:
        earlier = [WindowNotes(**row) for row in hosts.once(lambda: read_rows(path))]
    except TypeError:
        raise UserError(f"{path} does not have the fields of windows; remove it, and the run makes its windows again") from None
    return WindowedRows(order, read, builder, earlier=earlier, on_window=on_window, on_new=record)


def indexed(rows: Any, method: str, argument: str, window: int) -> Any:
    """The rows. Raises UserError if they cannot be read by index. method: such as "SFT.fit"; argument: that with the rows."""
    rows = without_frame(rows)
    if isinstance(rows, (str, bytes, dict)) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise UserError(f"{method}(window) is {window}, but {method}({argument}) is of type {type(rows).__name__}; rows with a "
                        "length and an index from 0, such as those of ja.read_rows, are expected")
    if not len(rows):
        raise UserError(f"{method}({argument}) is empty; at least one row is expected")
    return rows


class GivenRows:
    """Rows that are given to `fit` with a window.

    Args:
      trainer: the trainer; its attribute `cut` counts the rows of the first epoch that were cut, as far as it was read.
      argument: the argument of `fit` with the rows, such as "rows".
      rows: the rows.
      window: the maximum number of rows in a window.
      encode: `encode(row, where) -> document`, for a row and its name in messages.
      builder: makes the arrays of the documents.
      field: the name of the section's field with the length to which rows are cut.

    Raises:
      UserError: the rows cannot be read by index, or one of the first rows is malformed.
    """

    def __init__(
        self, trainer: Trainer, argument: str, rows: Any, window: int, encode: Callable[[Any, str], Any], builder: ArrayBuilder,
        field: str,
    ):
        method = f"{trainer.name}.fit"
        self._where, self._trainer, self._encode, self._builder = f"{method}({argument})", trainer, encode, builder
        self._rows, self._window, self._field = indexed(rows, method, argument, window), window, field
        first = [self._document(i) for i in range(min(IDENTIFYING_ROWS, len(rows)))]
        self.identity = np.frombuffer(repr((len(rows), first)).encode("utf-8"), np.uint8)
        """Identifies the rows: their number, and the tokens of the first of them."""

    def open(self, stream: int, directory: Path | None, counts: bool = True) -> WindowedRows:
        """The rows in windows. Close them after training.

        Args:
          stream: the random stream of their order.
          directory: the directory of the run; None for a run in memory.
          counts: whether rows that are cut are counted, and those of the first window are warned of.
        """
        trainer, order = self._trainer, WindowOrder(len(self._rows), self._window, self._trainer.inputs.seed, stream)

        def count(number: int, notes: WindowNotes) -> None:
            if counts and number < order.windows:  # Later epochs read the same rows again.
                trainer.cut += notes.cut
            if counts and number == 0:
                what, length = "rows of the first window", getattr(trainer.section, self._field)
                warn_of_cut(self._where, notes.cut, notes.answers, what, self._field, length)

        def read(index: Sequence[int]) -> Read:
            return Read([(i, self._document(i)) for i in index], [], {})

        if counts:
            trainer.cut = 0
        rows = windowed_rows(order, read, self._builder, directory, count)
        try:
            rows.first()
        except BaseException:
            rows.close()
            raise
        return rows

    def _document(self, number: int) -> Any:
        return self._encode(self._rows[number], f"{self._where}[{number}]")


def every_epoch(stopping: EarlyStopping | None, given: int, epoch: int) -> EarlyStopping | None:
    """The evaluation with the steps of an epoch between two measurements, if `given`, the argument eval_every, is 0."""
    return stopping if stopping is None or given else dataclasses.replace(stopping, every=epoch)


def closing(rows: WindowedRows, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps. Closes the rows after the last one."""
    with contextlib.closing(rows):
        yield from steps
