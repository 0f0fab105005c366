"""Append-only JSONL files that survive a crash. A crash can truncate only the last line, and a truncated line is dropped.

A line is complete once its newline is on disk; text after the last newline is a truncated line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TextIO

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json


def open_append(path: str | os.PathLike) -> TextIO:
    """Opens `path` for appending whole lines, after dropping a truncated last line. Creates missing folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return open(path, "a", encoding="utf-8", buffering=1, newline="\n")


def read_lines(path: str | os.PathLike) -> list[str]:
    """The complete lines of `path`, without newlines; a truncated last line is omitted. A missing file has no lines."""
    path = Path(path)
    if not path.exists():
        return []
    return path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]


def parse_row(line: str, path: str | os.PathLike, number: int) -> dict[str, Any]:
    """Parses one line as a JSON object.

    Raises:
        UserError: the line is not a JSON object. The error names the file and the line `number`, which counts from 1.
    """
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number} is not JSON ({error}); the file was edited or damaged: fix or remove the line."
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} contains a {type(row).__name__}; a JSON object is expected on every line.")
    return row


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Every complete line of `path` as an object; blank lines are skipped. Raises UserError like `parse_row`."""
    return [parse_row(line, path, number) for number, line in enumerate(read_lines(path), 1) if line.strip()]
