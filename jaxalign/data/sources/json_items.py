"""Reads JSON files that are one array, and files of prompts that are an object of arrays."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxalign.data.sources.jsonl import UTF8_BOM, BrokenLine, JsonRow, checked_value, open_bytes, read_bytes
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

COMMON = ("prompt", "messages", "conversations", "chosen", "question", "instruction")
"""Fields of common data sets that contain the prompt, by priority."""

_START = 4096  # Bytes in which an array begins.


def read_items(path: str | pathlib.Path, field: str) -> list[JsonRow | BrokenLine] | None:
    """The strings and objects of a JSON file, in file order.

    Args:
      path: a file with one JSON array, or an object whose values are arrays or such objects; optionally gzipped.
      field: the name of the field that contains the prompt.

    Returns:
      A JsonRow or a BrokenLine for each item, numbered from 1; None if the file has one JSON value per line.

    Raises:
      UserError: the file is missing, unreadable, not UTF-8 or not JSON, or has another JSON value.
    """
    raw = read_bytes(path)
    try:
        value = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} is not UTF-8 on line {line}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        if raw.lstrip()[:1] in (b"{", b'"'):
            return None
        raise UserError(f"{path} is not JSON: {error.msg} on line {error.lineno}, column {error.colno}; correct it, or give "
                        "one array of prompts") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not usable JSON: {error}; give one array of prompts") from None
    if isinstance(value, str):
        return None
    if isinstance(value, dict) and prompt_field(value, field) is not None:
        # An object whose fields are columns of values has many rows; any other one is a single line of JSON Lines.
        lists = all(isinstance(cells, list) for cells in value.values())
        if not lists or any(isinstance(cell, dict) for cells in value.values() for cell in cells):
            return None
    escaped = b"\\ud" in raw.lower()
    return [checked_value(number, item, strings=True, escaped=escaped)
            for number, item in enumerate(_items(path, value, field), start=1)]


def read_array(path: str | pathlib.Path) -> list[JsonRow | BrokenLine] | None:
    """The objects of a file with one JSON array, optionally gzipped, in file order.

    Returns:
      A JsonRow or a BrokenLine for each item, numbered from 1; None if the file does not begin with an array, or has more than
      one line with a value.

    Raises:
      UserError: the file is missing or unreadable, or its first line is "[" and it is not JSON.
    """
    with open_bytes(path) as stream:
        try:
            start = stream.read(_START).removeprefix(UTF8_BOM).lstrip()
        except (EOFError, zlib.error, OSError):
            return None  # The reader of lines says where the file is damaged.
    if not start.startswith(b"["):
        return None
    raw = read_bytes(path)
    try:
        value = parse_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if raw.split(maxsplit=1)[0] != b"[":
            return None  # Its lines are read one by one.
        where = f" on line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path} begins with \"[\" like a JSON array but is not JSON: {getattr(error, 'msg', error)}{where}; "
                        "correct it, or give a file with one JSON object on each line") from None
    escaped = b"\\ud" in raw.lower()
    return [checked_value(number, item, strings=False, escaped=escaped) for number, item in enumerate(value, start=1)]


def _items(path: str | pathlib.Path, value: Any, field: str) -> Iterator[Any]:
    """The items of an array, or of all arrays of an object, at any depth."""
    if isinstance(value, list):
        yield from value
    elif isinstance(value, dict) and prompt_field(value, field) is None:
        for group in value.values():
            yield from _items(path, group, field)
    elif isinstance(value, dict):
        raise UserError(f"{path} has an object with the fields {', '.join(value)} outside an array; give an array with one "
                        "object for each prompt")
    else:
        raise UserError(f"{path} has a JSON {type(value).__name__} outside an array; give one array of strings or objects, or "
                        "an object of such arrays")


def prompt_field(value: Mapping[str, Any], field: str = "prompt") -> str | None:
    """The field of an object that `parse_prompt` reads the prompt from; None if there is none."""
    present = [name for name in dict.fromkeys((field, *COMMON)) if value.get(name) is not None]
    if len(present) > 1 and present[0] == "chosen" != field:
        chosen = value["chosen"]
        if isinstance(chosen, str) and not chosen.lstrip().startswith(("Human:", "Assistant:")):
            return present[1]  # It is the text of an answer instead of a dialogue.
    return present[0] if present else None
