"""Reads the rows of a file of prompts, by the ending of its name: .txt, .csv, .json, or JSON Lines for any other ending.

Each file may be gzipped; then ".gz" follows the ending.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxalign.data.sources.csv_rows import iterate_csv
from jaxalign.data.sources.json_rows import read_items
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, iterate_jsonl, read_bytes


class FileRows(NamedTuple):
    """The rows of a file, each with a string or an object, and what their numbers count: "line" or "item"."""

    rows: Iterable[JsonRow | BrokenLine]
    unit: str = "line"


def file_rows(path: str | pathlib.Path, field: str = "prompt") -> FileRows:
    """The rows of a file of prompts, in order.

    Args:
      path: the file.
      field: the name of the field that contains the prompt.

    Raises:
      UserError: when the rows are read or before: the file is missing, unreadable or damaged.
    """
    ending = pathlib.Path(pathlib.Path(path).name.lower().removesuffix(".gz")).suffix
    if ending == ".txt":
        return FileRows(_text_lines(path))
    if ending == ".csv":
        return FileRows(iterate_csv(path))
    items = read_items(path, field) if ending == ".json" else None
    return FileRows(iterate_jsonl(path, strings=True)) if items is None else FileRows(items, "item")


def _text_lines(path: str | pathlib.Path) -> Iterator[JsonRow | BrokenLine]:
    """The non-blank lines of a text file."""
    for number, raw in enumerate(read_bytes(path).split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            yield BrokenLine(number, f"not UTF-8 at byte {error.start}")
            continue
        if line.strip():
            yield JsonRow(number, line)
