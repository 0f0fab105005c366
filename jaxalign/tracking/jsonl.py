"""Append-only JSONL files that survive a crash: at most the last line is torn, and a torn line is dropped.

A line is complete once its newline is on disk; text after the last newline was cut off by a crash.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from jaxalign.errors import UserError


def open_append(path: str | os.PathLike) -> TextIO:
    """Opens `path` for appending whole lines, after dropping a torn last line. Creates missing folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return open(path, "a", encoding="utf-8", buffering=1, newline="\n")


def read_lines(path: str | os.PathLike) -> list[str]:
    """The complete lines of `path`, without their newlines; a torn last line is left out. Missing file: no lines."""
    path = Path(path)
    if not path.exists():
        return []
    return path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]


def parse_row(line: str, path: str | os.PathLike, number: int) -> dict[str, Any]:
    """One line as an object.

    Raises:
        UserError: the line is not a JSON object; names the file and the line `number` (from 1).
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number} is not JSON ({error}); the file was edited or damaged: correct or remove the line."
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} holds a {type(row).__name__}; a JSON object is expected on every line.")
    return row


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Every complete line of `path` as an object; blank lines are skipped. Raises UserError as `parse_row`."""
    return [parse_row(line, path, number) for number, line in enumerate(read_lines(path), 1) if line.strip()]
