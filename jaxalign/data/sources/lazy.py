"""Records of a table that are made when they are needed, so that only the numbers of their rows are in memory."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jaxalign.data.sources.jsonl import JsonRow
from jaxalign.data.sources.row_files import RowFile
from jaxalign.data.sources.tables import TableRows

RecordT = TypeVar("RecordT")


class LazyRecords(Sequence, Generic[RecordT]):
    """Records by index.

    Args:
      make: makes the record of a row of the table, by the row's index; the same record in every call.
      rows: the indices of the rows, int64.
    """

    def __init__(self, make: Callable[[int], RecordT], rows: np.ndarray):
        self._make, self._rows = make, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return LazyRecords(self._make, self._rows[index])
        return self._make(int(self._rows[index]))

    def __iter__(self) -> Iterator[RecordT]:
        return (self._make(int(row)) for row in self._rows)

    def take(self, index: np.ndarray) -> LazyRecords[RecordT]:
        """The records at several indices, also made when they are needed."""
        return LazyRecords(self._make, self._rows[index])

    def mapped(self, function: Callable[[RecordT], Any]) -> LazyRecords:
        """The results of a function of the records, which is called when a result is needed."""
        make = self._make
        return LazyRecords(lambda row: function(make(row)), self._rows)


class KeptRecords(Generic[RecordT]):
    """The records that a reader keeps: of a table the numbers of their rows, of other files the records themselves.

    Args:
      rows: the rows that are read.
    """

    def __init__(self, rows: RowFile):
        self._table = rows if isinstance(rows, TableRows) else None
        self._kept: Any = [] if self._table is None else array.array("q")

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, row: JsonRow, record: RecordT) -> None:
        """Keeps the record of a row."""
        self._kept.append(row.line - 1 if self._table is not None else record)

    def records(self, make: Callable[[JsonRow], RecordT]) -> list[RecordT] | LazyRecords[RecordT]:
        """The records in order. make: makes the record of a kept row again; it is called for a table only."""
        table = self._table
        if table is None:
            return self._kept
        return LazyRecords(lambda row: make(table[row]), np.asarray(self._kept, np.int64))
