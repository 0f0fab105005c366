"""Reads JSON Lines files, plain or gzipped. Every non-blank line becomes a row or a reported broken line.

Only newline bytes separate lines, so U+2028 inside a string does not split a line. Line numbers start at 1 and include blank
lines, as in an editor.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"
_UNREAD = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd", b"BZh": "compressed with bzip2", b"\xfd7zXZ\x00": "compressed with xz",
    b"PK\x03\x04": "a zip archive", b"\xff\xfe": "UTF-16 text", b"\xfe\xff": "UTF-16 text",
}
"""The first bytes of files that are not read, and what such a file is."""
_HALF_PAIR = "has half of a surrogate pair (\\ud...), which is not a character"
_LISTED = 5  # Number of reasons that an error message lists; it counts the lines with other reasons.
_NAMED = 12  # Number of columns that an error message names.


@dataclasses.dataclass(frozen=True)
class JsonRow:
    """One JSON object and its line number, or its position in a JSON array. Some readers also accept a string."""

    line: int
    value: Any


@dataclasses.dataclass(frozen=True)
class BrokenLine:
    """The number of a line, or of an item of a JSON array, that cannot be used, and the reason."""

    line: int
    reason: str


def read_jsonl(path: str | pathlib.Path, max_bad_share: float = 0.0) -> tuple[list[JsonRow], list[BrokenLine]]:
    """Reads a whole file.

    Args:
      path: a .jsonl file, optionally gzipped (detected from its first bytes, not its name).
      max_bad_share: the largest accepted share of broken lines, in [0, 1].

    Returns:
      The rows in file order, and the broken lines.

    Raises:
      UserError: the file is missing, unreadable, damaged or has no row, or too many of its lines are broken.
    """
    rows, broken = [], []
    for item in iterate_jsonl(path):
        (rows if isinstance(item, JsonRow) else broken).append(item)
    check_bad_share(path, broken, len(rows) + len(broken), max_bad_share)
    if not rows:
        raise UserError(f"{path} has no rows; a JSONL file has one JSON object on each line")
    return rows, broken


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if the file is damaged or contains another JSON value."""
    try:
        text = path.read_text(encoding="utf-8")
        value = parse_json(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{path} {_HALF_PAIR}; download or copy it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} contains a {type(value).__name__}; an object is expected: download or copy it again")
    return value


def iterate_jsonl(path: str | pathlib.Path, strings: bool = False) -> Iterator[JsonRow | BrokenLine]:
    """Yields each non-blank line as a JsonRow or a BrokenLine, in file order.

    Args:
      path: the file.
      strings: whether a line may also be a JSON string.

    Raises:
      UserError: the file is missing or unreadable, or its compressed data is truncated or damaged.
    """
    number = 0
    with open_bytes(path) as stream:
        try:
            for number, raw in numbered_lines(stream):
                yield parse_line(number, raw, strings)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is damaged or cut short after line {number} ({error}); download or copy it again"
            ) from error
        except OSError as error:
            raise UserError(f"{path} cannot be read after line {number}: {error.strerror or error}") from error


def numbered_lines(stream: Iterable[bytes], start: int = 1) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not blank, without the byte order mark of line 1. start: the number of the first."""
    for number, raw in enumerate(stream, start):
        raw = raw.removeprefix(UTF8_BOM) if number == 1 else raw
        if raw.strip():
            yield number, raw


def read_bytes(path: str | pathlib.Path) -> bytes:
    """The content of a file, unzipped and without a byte order mark.

    Raises:
      UserError: the file is missing or unreadable, or its compressed data is truncated or damaged.
    """
    with open_bytes(path) as stream:
        try:
            return stream.read().removeprefix(UTF8_BOM)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged or cut short ({error}); download or copy it again") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def check_bad_share(
    path: str | pathlib.Path, broken: Sequence[BrokenLine], total: int, max_bad_share: float, unit: str = "line",
    place: Callable[[int], str] | None = None, count: int | None = None, columns: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Raises UserError if more than `max_bad_share` of `total` rows are broken. It lists the first reasons, each with its first
    row.

    Args:
      unit: what the numbers of the rows count, such as "line".
      place: the place of a row by its number; None: that of a line.
      count: the number of broken rows, if `broken` has only the first of them.
      columns: the names of the columns, which the error gives if all rows are broken.
    """
    count = len(broken) if count is None else count
    if not broken or count <= max_bad_share * total:
        return
    lines: dict[str, list[int]] = {}
    for item in broken:
        lines.setdefault(item.reason, []).append(item.line)
    listed, left = [], count
    for reason, own in list(lines.items())[:_LISTED]:
        others = f" and {len(own) - 1} other {unit}{'s' if len(own) > 2 else ''}" if len(own) > 1 else ""
        listed.append(f"{place(own[0]) if place else f'{path}:{own[0]}'}{others}: {reason}")
        left -= len(own)
    more = f"; and {left} more" if left else ""
    remedy = "fix them or raise data.max_bad_share" if count < total else "fix them, or give another file"
    if count == total and (names := list(columns())):
        shown = ", ".join(map(str, names[:_NAMED])) + " ..." * (len(names) > _NAMED)
        remedy = f"the columns are {shown}: fix the {unit}s, or map columns to the expected fields (data.columns=FIELD=COLUMN)"
    raise UserError(f"{count} of {total} {unit}s of {path} are broken, more than the accepted share {max_bad_share:g} "
                    f"({'; '.join(listed)}{more}); {remedy}")


def open_bytes(path: str | pathlib.Path) -> IO[bytes]:
    """The unzipped bytes of a file. Raises UserError if it is missing, unreadable or not a regular file."""
    file = pathlib.Path(path).expanduser()
    if not os.path.exists(file):  # Unlike Path.exists, False also for a name that is too long.
        raise UserError(f"the file {path} does not exist; give the path of a data file")
    if file.is_dir():
        raise UserError(f"{path} is a folder; give the path of one file in it")
    if not file.is_file():
        # Reading it could block, or never end.
        raise UserError(f"{path} is a pipe, a socket or a device; give the path of a regular file")
    try:
        with file.open("rb") as stream:
            start = stream.read(10)
        if unread := next((kind for magic, kind in _UNREAD.items() if start.startswith(magic)), None):
            raise UserError(f"{path} is {unread}, which is not read; give UTF-8 text, which may be compressed with gzip")
        return gzip.open(file, "rb") if start.startswith(_GZIP_MAGIC) else file.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def is_zipped(path: pathlib.Path) -> bool:
    """Whether a regular file begins as gzip does; False if there is no such file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP_MAGIC


def checked_value(number: int, value: Any, strings: bool, escaped: bool = True) -> JsonRow | BrokenLine:
    """A decoded JSON value as a JsonRow, or as a BrokenLine if it is not an object and not an accepted string.

    Args:
      number: its line or position.
      value: the value.
      strings: whether it may be a string.
      escaped: whether the text of the file has an escape such as \\ud800. Half a surrogate pair is valid JSON but not text: it
        cannot be tokenized or written.
    """
    try:
        if escaped:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return BrokenLine(number, _HALF_PAIR)
    if not isinstance(value, dict) and not (strings and isinstance(value, str)):
        return BrokenLine(number, f"a JSON {type(value).__name__}; an object {{...}} is expected")
    return JsonRow(number, value)


def parse_line(number: int, raw: bytes, strings: bool = False) -> JsonRow | BrokenLine:
    """A line that is not blank as a row.

    Args:
      number: its number.
      raw: its bytes, with or without the end of the line.
      strings: whether it may be a JSON string.
    """
    raw = raw.rstrip(b"\r\n")
    try:
        value = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BrokenLine(number, f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return BrokenLine(number, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BrokenLine(number, f"not usable JSON: {error}")
    return checked_value(number, value, strings, b"\\ud" in raw.lower())
