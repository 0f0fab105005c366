"""Names the columns of a file: `config.data.columns` maps the fields that readers know to the columns that have them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from jaxalign.config.columns import parse_columns
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
