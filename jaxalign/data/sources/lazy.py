"""Reads rows into records. Those of a table are made when they are needed: only the numbers of their rows are in memory.

Rows that repeat or contradict an earlier row are found by 64-bit hashes of their text.
"""

from __future__ import annotations

import array
import collections
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, check_bad_share
from jaxalign.data.sources.rows import open_rows
from jaxalign.data.sources.tables import TableRows
from jaxalign.records import Comparison, Demonstration, Judgement

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


class RowReader(Protocol):
    """Makes the record of a row."""

    reasons: Mapping[str, str]
    """For each reason, the description of its rows in sentences."""
    kept: str
    """The field of reports with the number of records: "pairs" or "answers"."""

    def read(self, row: JsonRow | BrokenLine, listed: dict[str, list]) -> Any:
        """The record; None for a dropped row. The number of a dropped or changed row is added to the list of its reason."""


class ReadRecords(NamedTuple):
    """The records in order; the number of rows that were read; for each reason, the numbers of the rows that were dropped or
    changed, and what they count (`RowFile.unit`); the number of records that `counts` counts."""

    records: Any
    rows: int
    lines: dict[str, tuple]
    unit: str
    counted: int


def read_records(
    path: str | pathlib.Path, columns: Sequence[str], reader: RowReader, uncut: RowReader, max_bad_share: float, limit: int,
    counts: Callable[[Any], bool],
) -> ReadRecords:
    """Reads rows into records. Of a table only the numbers of the rows are kept, of other files the records themselves.

    Args:
      path: data that `open_rows` reads.
      columns: the entries of `config.data.columns`.
      reader: makes the records.
      uncut: a reader that does not cut dialogues, which makes the records of rows again that need not be cut.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of records; 0 reads all.
      counts: whether a record is counted.

    Raises:
      UserError: the data is missing or damaged, or too many rows are broken.
    """
    source, rows, counted = open_rows(path, columns), 0, 0
    table = source if isinstance(source, TableRows) else None
    listed: dict[str, list] = {reason: [] for reason in reader.reasons}
    kept: Any = [] if table is None else array.array("q")
    repeated = RepeatedRows()
    for row in source:
        rows += 1
        record = reader.read(row, listed)
        if record is not None:
            kept.append(record if table is None else row.line - 1)
            repeated.add(row.line, record)
            counted += counts(record)
        if limit and len(kept) == limit:
            break
    check_bad_share(path, listed["broken"], rows, max_bad_share, source.unit, source.place, columns=source.first_columns)
    lines = {reason: tuple(places) for reason, places in (listed | repeated.listed()).items()}
    cut = frozenset(lines["cut"])

    def make(index: int) -> Any:
        row = table[index]
        return (reader if row.line in cut else uncut).read(row, collections.defaultdict(list))

    records = kept if table is None else LazyRecords(make, np.asarray(kept, np.int64))
    return ReadRecords(records, rows, lines, source.unit, counted)


_MOST = 1_000_000
"""The number of rows of a file that are compared; they need 16 MB."""


class RepeatedRows:
    """The numbers of rows with the text of an earlier row, among the first million rows."""

    def __init__(self):
        self._digests, self._lines = array.array("Q"), array.array("q")

    def add(self, line: int, record: Comparison | Demonstration | Judgement) -> None:
        """Adds the record of a row."""
        if len(self._digests) < _MOST:
            self._digests.append(_digest(record))
            self._lines.append(line)

    def listed(self) -> dict[str, list[int]]:
        """"repeated": the rows that repeat an earlier row. "contradicted": the rows with the opposite label of an earlier row,
        which is the first with their text. Both in the order in which the rows were added."""
        lines, digests = np.asarray(self._lines, np.int64), np.asarray(self._digests, np.uint64)
        texts, labels = digests >> np.uint64(1), digests & np.uint64(1)
        _, first, number = np.unique(texts, return_index=True, return_inverse=True)
        opposite = labels != labels[first[number]]
        return {"repeated": np.delete(lines, _first_rows(digests)).tolist(), "contradicted": lines[opposite].tolist()}


def distinct_pairs(pairs: Sequence[Comparison]) -> Sequence[Comparison]:
    """The pairs without those that repeat the dialogue, the answers and the label of an earlier pair."""
    hashes = (_hash((_digest(pair), pair.label)) for pair in pairs)
    first = _first_rows(np.fromiter(hashes, np.uint64, len(pairs)))
    if len(first) == len(pairs):
        return pairs
    return pairs.take(first) if isinstance(pairs, LazyRecords) else [pairs[row] for row in first]


def _digest(record: Comparison | Demonstration | Judgement) -> int:
    """A hash of the dialogue and of the answers in either order, whose lowest bit is the label."""
    messages = record.prompt.messages
    if isinstance(record, Comparison):
        answers = sorted((record.response_a, record.response_b))
        return _hash((messages, answers)) & ~1 | (record.response_a == answers[0])
    return _hash((messages, record.response)) & ~1 | (isinstance(record, Judgement) and record.desirable)


def _hash(content: object) -> int:
    """The first 64 bits of a hash of a value's `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _first_rows(digests: np.ndarray) -> np.ndarray:
    """The indices of the rows whose digest no earlier row has, in ascending order."""
    return np.sort(np.unique(digests, return_index=True)[1])
