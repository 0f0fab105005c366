"""Rows of tables by index: Parquet and Arrow files, folders of them, saved data sets and TFDS, behind one class.

A table is a sequence of parts, such as the files of a folder. Rows are numbered from 1 through all parts. At most a few
thousand rows are in memory at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.row_files import ColumnMap, RowFile

CHUNK = 1024
"""Rows that are decoded together."""


class Undecodable(NamedTuple):
    """A row that cannot be decoded, and the reason."""

    reason: str


class Chunk(NamedTuple):
    """Decoded rows [start, start + len(rows)) of a part: dictionaries, or `Undecodable`."""

    start: int
    rows: list[Any]


class Part(Protocol):
    """A part of a table. `name` is its name in messages, `columns` the names of its columns."""

    name: str
    columns: tuple[str, ...]

    def __len__(self) -> int:
        """The number of rows."""

    def chunk(self, index: int) -> Chunk:
        """Rows that contain row `index`. Raises UserError if the data is damaged."""

    def release(self) -> None:
        """Closes what reading has opened. The next `chunk` opens it again."""


class TableRows(RowFile):
    """The rows of all parts in order.

    Args:
      path: the name of the table in messages.
      parts: its parts, all with the same columns.
      columns: the columns with other names.

    Raises:
      UserError: a mapped column does not exist.
    """

    unit = "row"

    def __init__(self, path: Any, parts: Sequence[Part], columns: ColumnMap):
        super().__init__(path)
        self._parts, self._map = parts, columns
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        self._chunk, self._of = Chunk(0, []), -1
        # The part that keeps an open file, with buffers of about a megabyte for each column; -1 before the first read.
        self._reading = -1
        names = parts[0].columns if parts else ()
        columns.check(path, names)
        self.columns = tuple(columns.apply(dict.fromkeys(names)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> JsonRow | BrokenLine:
        """Row `index`, counted from 0; its number is `index + 1`. Raises IndexError beyond the end."""
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table with {len(self)} rows")
        number, within = self._locate(index)
        start, rows = self._chunk
        if number != self._of or not start <= within < start + len(rows):
            self._chunk, self._of = self._read(number, within), number
        return self._row(index + 1, self._chunk.rows[within - self._chunk.start])

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        number = 0
        for at, part in enumerate(self._parts):
            index = 0
            while index < len(part):
                start, rows = self._read(at, index)
                for value in rows[index - start :]:
                    number += 1
                    yield self._row(number, value)
                index = start + len(rows)

    def _read(self, number: int, index: int) -> Chunk:
        """The rows of part `number` that contain its row `index`."""
        if self._reading not in (-1, number):
            self._parts[self._reading].release()
        self._reading = number
        return self._parts[number].chunk(index)

    def place(self, number: int) -> str:
        part, within = self._locate(number - 1)
        return f"{self._parts[part].name} row {within + 1}"

    def _row(self, number: int, value: Any) -> JsonRow | BrokenLine:
        """A decoded row. An empty cell is left out, as a field that is missing from a row of JSON Lines."""
        if isinstance(value, Undecodable):
            return BrokenLine(number, value.reason)
        return JsonRow(number, self._map.apply({name: cell for name, cell in value.items() if cell is not None}))

    def _locate(self, index: int) -> tuple[int, int]:
        """The part of a row and the row's index in it."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
