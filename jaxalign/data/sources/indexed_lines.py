"""Rows of JSON Lines by index. One pass over a file records the place of every 1,024th row; no row is kept in memory."""

from __future__ import annotations

import array
import bisect
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, is_zipped, numbered_lines, open_bytes, parse_line
from jaxalign.data.sources.row_files import FIRST_ROWS, ColumnMap, RowFile
from jaxalign.errors import UserError

_STRIDE = 1024
"""Rows between two recorded places, and rows that are read together."""


class IndexedLines(RowFile):
    """The rows of .jsonl files by index, one file after another. Numbers count the lines of all files, as in `TextFolder`.

    Args:
      path: the file or the folder, as messages name it.
      files: the files.
      columns: the columns with other names.
      strings: whether rows may be strings, as prompts.

    Raises:
      UserError: a file is missing, unreadable or zipped, or a mapped column is in none of the first rows.
    """

    def __init__(self, path: Any, files: Sequence[pathlib.Path], columns: ColumnMap, strings: bool = False):
        super().__init__(path)
        self._files, self._map, self._strings = list(files), columns, strings
        self._ends: list[int] = []  # The number of rows up to the end of each file.
        self._lines = [0]  # The number of lines before each file, as the numbers of rows count them.
        self._places: list[tuple[array.array, array.array]] = []  # For each file, the offset and the line of every 1,024th row.
        self._chunk: list[tuple[int, bytes]] = []
        self._of = (-1, -1)  # The file and the number of the chunk that was read last.
        for file in self._files:
            self._index(file)
        if columns.fields and len(self):
            rows = (self._parsed(i) for i in range(min(FIRST_ROWS, len(self))))
            values = [row.value for row in rows if isinstance(row, JsonRow) and isinstance(row.value, Mapping)]
            columns.check(path, (name for value in values for name in value))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> JsonRow | BrokenLine:
        """Row `index`, counted from 0; its number is that of its line. Raises IndexError beyond the end."""
        row = self._parsed(index)
        return row if isinstance(row, BrokenLine) else JsonRow(row.line, self._map.apply(row.value))

    def __iter__(self) -> Iterator[JsonRow | BrokenLine]:
        return (self[i] for i in range(len(self)))

    def place(self, number: int) -> str:
        file = bisect.bisect_left(self._lines, number) - 1
        return f"{self._files[file]}:{number - self._lines[file]}"

    def _index(self, path: pathlib.Path) -> None:
        if is_zipped(path):
            raise UserError(f"{path} is zipped, so that its rows cannot be read by index as config.data.window needs; unzip "
                            "it, convert it to Parquet, or set config.data.window to 0")
        offsets, lines, rows, offset, last = array.array("q"), array.array("q"), 0, 0, 0

        def counted(stream: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal offset, last
            for raw in stream:
                yield raw
                offset, last = offset + len(raw), last + 1

        with open_bytes(path) as stream:
            for line, _ in numbered_lines(counted(stream)):
                if rows % _STRIDE == 0:
                    offsets.append(offset)  # Of the line itself: its length is added when the next line is read.
                    lines.append(line)
                rows += 1
        self._places.append((offsets, lines))
        self._ends.append(len(self) + rows)
        self._lines.append(self._lines[-1] + last)

    def _parsed(self, index: int) -> JsonRow | BrokenLine:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        file = bisect.bisect_right(self._ends, index)
        chunk, within = divmod(index - (self._ends[file - 1] if file else 0), _STRIDE)
        if self._of != (file, chunk):
            self._chunk, self._of = self._read(file, chunk), (file, chunk)
        line, raw = self._chunk[within]
        return parse_line(line, raw, self._strings)

    def _read(self, file: int, chunk: int) -> list[tuple[int, bytes]]:
        """(number, bytes) of the rows of a chunk."""
        offsets, lines = self._places[file]
        with open_bytes(self._files[file]) as stream:
            stream.seek(offsets[chunk])
            before = self._lines[file]
            return [(before + line, raw) for line, raw in itertools.islice(numbered_lines(stream, lines[chunk]), _STRIDE)]
