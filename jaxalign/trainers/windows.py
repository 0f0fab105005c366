"""The windows of a training run: their numbers in its directory, and those of rows that are given to `SFT.fit`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxalign.data.windows import Document, Read, WindowedRows, WindowNotes, WindowOrder
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.tracking.jsonl import open_append, read_rows

FILE = "windows.jsonl"
"""The numbers of the windows that a run has used (`data.windows.WindowNotes`), from which an interrupted run knows the place of
its step."""


def windowed_rows(
    order: WindowOrder, read: Callable[[Sequence[int]], Read], row_length: int, directory: Path | None,
    on_window: Callable[[int, WindowNotes], None] | None = None,
) -> WindowedRows:
    """The packed rows of windows, whose numbers are kept in the directory of the run.

    Args:
      order, read, row_length, on_window: as in `WindowedRows`.
      directory: the directory of the run; None for a run in memory.

    Raises:
      UserError: the file of the windows is damaged.
    """
    if directory is None:
        return WindowedRows(order, read, row_length, on_window=on_window)
    path = directory / FILE

    def record(notes: WindowNotes) -> None:
        if hosts.is_first():
            with open_append(path) as file:
                file.write(json.dumps(dataclasses.asdict(notes)) + "\n")

    try:
        earlier = [WindowNotes(**row) for row in hosts.once(lambda: read_rows(path))]
    except TypeError:
        raise UserError(f"{path} does not have the fields of windows; remove it, and the run makes its windows again") from None
    return WindowedRows(order, read, row_length, earlier=earlier, on_window=on_window, on_new=record)


def indexed(rows: Any, where: str, window: int) -> Any:
    """The rows. Raises UserError if they cannot be read by index. where: the name of the method."""
    if isinstance(rows, (str, bytes, dict)) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise UserError(f"{where}(window) is {window}, but {where}(rows) is of type {type(rows).__name__}; rows with a length "
                        "and an index from 0, such as those of ja.read_rows, are expected")
    if not len(rows):
        raise UserError(f"{where}(rows) is empty; at least one row is expected")
    return rows


def reading(rows: Sequence[Any], encode: Callable[[Any, int], Document]) -> Callable[[Sequence[int]], Read]:
    """A function that reads rows for `WindowedRows`. encode: `encode(row, number) -> document`."""
    return lambda index: Read([(i, encode(rows[i], i)) for i in index], [], {})
