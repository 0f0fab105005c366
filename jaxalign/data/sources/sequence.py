"""The rows of a file as a sequence of dictionaries, for the Python API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.row_files import RowFile
from jaxalign.data.sources.rows import open_rows
from jaxalign.data.sources.tables import TableRows
from jaxalign.errors import UserError


class FileRows(Sequence):
    """The rows of data as dictionaries, by index. A row that cannot be used raises UserError, which names its place."""

    def __init__(self, rows: RowFile):
        self._file = rows
        self._rows: Any = rows if isinstance(rows, TableRows) else list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        """A row, or a list of the rows of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._value(self._rows[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._value, self._rows)

    def _value(self, row: JsonRow | BrokenLine) -> dict[str, Any]:
        if isinstance(row, BrokenLine):
            raise UserError(f"{self._file.place(row.line)}: {row.reason}; correct the row or remove it")
        return row.value


def read_rows(path: str | Path, columns: Mapping[str, str] | None = None) -> FileRows:
    """The rows of data for `fit`, in the formats of docs/data_formats.md.

        trainer.fit(read_rows("train.parquet", columns={"prompt": "question"}))

    Rows of Parquet, Arrow and TFDS are read when they are needed; those of JSON Lines are held in memory.

    Args:
      path: a JSONL, Parquet or Arrow file, a folder of such files, a folder that `datasets` saved, or
        "tfds:NAME[/CONFIG][:SPLIT]".
      columns: for fields of the rows, the columns of the data that they are read from; the other columns keep their names.

    Returns:
      A sequence of dictionaries.

    Raises:
      UserError: the data is missing or damaged, it has no such column, or the package that reads it is not installed.
    """
    return FileRows(open_rows(path, [f"{field}={column}" for field, column in (columns or {}).items()]))
