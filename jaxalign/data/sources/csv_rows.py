"""Reads the rows of a CSV file (RFC 4180) with a header row. A row has the number of its first line."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, read_bytes
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_UNREADABLE = ("unexpected end of data", "field larger than field limit")
"""Errors of a quote that is not closed: the reader has taken all later rows for one field."""


def iterate_csv(path: str | pathlib.Path) -> Iterator[JsonRow | BrokenLine]:
    """Yields each row as a JsonRow with an object of strings, or as a BrokenLine, in file order.

    Blank rows are left out, and so are columns without a name. The column "messages" may contain JSON.

    Args:
      path: the file, in UTF-8 with or without a byte order mark; optionally gzipped.

    Raises:
      UserError: the file is missing or unreadable, has no valid header row, or a quote is not closed.
    """
    header: Sequence[str] | None = None
    for line, cells in _cells(path):
        if header is None:
            header = _header(path, line, cells)
        elif isinstance(cells, BrokenLine):
            yield cells
        elif len(cells) != len(header):
            yield BrokenLine(line, f"{len(cells)} fields; {len(header)} as in the header row are expected")
        else:
            yield _row(line, {name: cell for name, cell in zip(header, cells, strict=True) if name})
    if header is None:
        raise UserError(f"{path} is empty; a header row with the names of the columns is expected")


def _cells(path: str | pathlib.Path) -> Iterator[tuple[int, list[str] | BrokenLine]]:
    """The first line and the cells of each row that is not blank."""
    text = io.StringIO(read_bytes(path).decode("utf-8", errors="surrogateescape"), newline="")
    reader = csv.reader(text, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
            "".join(cells).encode("utf-8")
        except StopIteration:
            return
        except UnicodeEncodeError:
            yield line, BrokenLine(line, "not UTF-8")
        except csv.Error as error:
            if any(reason in str(error) for reason in _UNREADABLE):
                raise UserError(f"{path} has a quote in the row of line {line} that is not closed ({error}); close it, and "
                                "double a quote inside a field") from None
            yield line, BrokenLine(line, f"not CSV: {error}")
        else:
            if cells:
                yield line, cells


def _header(path: str | pathlib.Path, line: int, cells: list[str] | BrokenLine) -> list[str]:
    if isinstance(cells, BrokenLine):
        raise UserError(f"{path}:{line}: the header row is {cells.reason}; save the file as CSV in UTF-8")
    if len(cells) == 1 and (mark := next((mark for mark in (";", "\t") if mark in cells[0]), None)):
        raise UserError(f"{path}:{line}: the header row separates columns by {mark!r}; separate them by commas")
    names = [cell.strip() for cell in cells]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}:{line}: the header row has the column {twice!r} twice; give each column its own name")
    return names


def _row(line: int, fields: dict[str, Any]) -> JsonRow | BrokenLine:
    """The row, with the JSON list of messages in its place."""
    messages = fields.get("messages", "")
    if messages.startswith("["):
        try:
            fields["messages"] = parse_json(messages)
        except (ValueError, RecursionError) as error:
            return BrokenLine(line, f'"messages" is not JSON: {error}')
    return JsonRow(line, fields)
