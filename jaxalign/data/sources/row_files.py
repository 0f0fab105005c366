"""The rows of a file with their places for messages, whatever its format, and the names of their columns: `config.data.columns`
maps the fields that readers know to the columns that have them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from jaxalign.config.sections.data import parse_columns
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.errors import UserError

FIRST_ROWS = 100
"""Rows of a file without a schema in which every named column must occur."""


@dataclasses.dataclass(frozen=True)
class ColumnMap:
    """The columns that are read as fields of another name.

    Attributes:
      fields: the column of each field.
    """

    fields: Mapping[str, str]

    @classmethod
    def of(cls, entries: Sequence[str]) -> ColumnMap:
        """The map of entries "field=column". Raises UserError for another form."""
        return cls(parse_columns(entries))

    def apply(self, row: Any) -> Any:
        """A row whose mapped columns have the names of their fields. A column that had such a name is left out."""
        if not self.fields or not isinstance(row, Mapping):
            return row
        taken = set(self.fields) | set(self.fields.values())
        mapped = {field: row[column] for field, column in self.fields.items() if column in row}
        return mapped | {name: value for name, value in row.items() if name not in taken}

    def check(self, path: Any, names: Iterable[str]) -> None:
        """Raises UserError if a mapped column is not among the names of the file's columns."""
        names = list(dict.fromkeys(names))
        for field, column in self.fields.items():
            if column in names:
                continue
            near = get_close_matches(column, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"set {field}= to one of them"
            raise UserError(f"config.data.columns has {field}={column}, but {path} has no column {column!r}; its columns are "
                            f"{', '.join(names) or 'none'}: {hint}")

    def rows(self, path: Any, rows: Iterable[JsonRow | BrokenLine]) -> Iterator[JsonRow | BrokenLine]:
        """The rows of a file without a schema, with mapped columns.

        Raises:
          UserError: when the first row is read: a mapped column is in none of the first rows.
        """
        if not self.fields:
            yield from rows
            return
        rows = iter(rows)
        first = list(itertools.islice(rows, FIRST_ROWS))
        objects = [row.value for row in first if isinstance(row, JsonRow) and isinstance(row.value, Mapping)]
        if first:
            self.check(path, (name for value in objects for name in value))
        for row in itertools.chain(first, rows):
            yield row if isinstance(row, BrokenLine) else JsonRow(row.line, self.apply(row.value))


class RowFile:
    """The rows of a file, a folder or a data set, in order.

    Attributes:
      path: its name in messages.
      unit: what the numbers of rows count: "line", "item" (of a JSON array) or "row" (of a table).
      columns: the names of its columns, after mapping; None if rows may have different fields.
    """

    unit: str = "line"
    columns: tuple[str, ...] | None = None

    def __init__(self, path: Any):
        self.path = path

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        """The rows; a row that cannot be used is a `BrokenLine`. Raises UserError if the data is damaged."""
        raise NotImplementedError

    def first_columns(self) -> tuple[str, ...]:
        """The names of the columns, after mapping; of rows with different fields, those of the first object, if an early row is
        one."""
        if self.columns is not None:
            return self.columns
        values = (row.value for row in itertools.islice(self, FIRST_ROWS) if isinstance(row, JsonRow))
        return next((tuple(value) for value in values if isinstance(value, Mapping)), ())

    def place(self, number: int) -> str:
        """The place of a row for messages."""
        return f"{self.path}:{number}" if self.unit == "line" else f"{self.path}, {self.unit} {number}"


class TextRows(RowFile):
    """The rows of a text file, which are read in order.

    Args:
      path: the file.
      read: reads the rows, each time from the beginning.
      mapped: the names of their columns.
      unit: as in `RowFile`.
    """

    def __init__(self, path: Any, read: Callable[[], Iterable[JsonRow | BrokenLine]], mapped: ColumnMap, unit: str = "line"):
        super().__init__(path)
        self._read, self._mapped, self.unit = read, mapped, unit

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        return self._mapped.rows(self.path, self._read())


class ListedRows(RowFile):
    """Rows of a text file that are all in memory, for formats that cannot be read by index.

    Args:
      rows: the rows.
    """

    def __init__(self, rows: RowFile):
        super().__init__(rows.path)
        self.unit, self._file, self._rows = rows.unit, rows, list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> JsonRow | BrokenLine:
        return self._rows[index]

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        return iter(self._rows)

    def place(self, number: int) -> str:
        return self._file.place(number)


class TextFolder(RowFile):
    """The rows of several text files, one file after another. Numbers count the lines of all files.

    Args:
      path: the folder.
      files: its files.
    """

    def __init__(self, path: Any, files: list[RowFile]):
        super().__init__(path)
        self._files = files
        self._before: list[int] = []  # The lines before each file that was opened.

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        self._before, last = [], 0
        for file in self._files:
            before = last
            self._before.append(before)
            for row in file:
                last = before + row.line
                yield type(row)(last, row.value if isinstance(row, JsonRow) else row.reason)

    def place(self, number: int) -> str:
        at = max(i for i, before in enumerate(self._before) if before < number)
        return self._files[at].place(number - self._before[at])
