"""The rows of a file with their places for messages, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow


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

    def place(self, number: int) -> str:
        """The place of a row for messages."""
        return f"{self.path}:{number}" if self.unit == "line" else f"{self.path}, {self.unit} {number}"


class TextRows(RowFile):
    """The rows of a text file, which are read in order.

    Args:
      path: the file.
      read: reads the rows, each time from the beginning.
      unit: as in `RowFile`.
    """

    def __init__(self, path: Any, read: Callable[[], Iterable[JsonRow | BrokenLine]], unit: str = "line"):
        super().__init__(path)
        self._read, self.unit = read, unit

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        return iter(self._read())


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
