"""Reads a filled sheet: the CSV file, the JSONL file, or the file that the page saves."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

TIE, FIRST, SECOND = 0, 1, 2
"""The values of a rating: no answer is better, the first one is, or the second one."""
_VALUES = {"0": TIE, "=": TIE, "1": FIRST, "2": SECOND}
_AGAIN = "copy the file again, or save it again"


class Filled(NamedTuple):
    """The ratings of a file by the id of the pair, None for a pair without one, and the name of the rater, if it has one."""

    ratings: dict[str, int | None]
    rater: str


class _Entry(NamedTuple):
    """One pair of a file. place: where it is, such as "line 3"."""

    sheet: Any
    id: Any
    rating: Any
    place: str


def read_filled(path: Path, sheet: str, ids: Collection[str]) -> Filled:
    """Reads and checks a filled sheet. The format follows from the content, not from the name.

    Args:
      path: the file.
      sheet: the hash of the sheet.
      ids: the ids of the sheet's pairs.

    Raises:
      UserError: the file cannot be read or is cut short, belongs to another sheet, has an unknown id, an id twice, a value
        that is no rating, or no rating.
    """
    entries, rater = _entries(path, _text(path))
    ratings: dict[str, int | None] = {}
    for entry in entries:
        place = f"{path}, {entry.place}"
        if entry.sheet != sheet:
            raise UserError(f"{place} belongs to the sheet {entry.sheet!r}, the key to {sheet!r}; give the key of the same "
                            "sheet as --key")
        if not isinstance(entry.id, str) or entry.id not in ids:
            raise UserError(f"{place} has the id {entry.id!r}, which is not on the sheet; restore the ids of the sheet")
        if entry.id in ratings:
            raise UserError(f"{place} has the id {entry.id!r} a second time; keep one row for each pair")
        ratings[entry.id] = _rating(entry.rating, place)
    if len(ratings) < len(ids):
        raise UserError(f"{path} has {len(ratings):,} of the sheet's {len(ids):,} pairs, so it is cut short or rows were "
                        f"deleted; {_AGAIN}")
    if all(rating is None for rating in ratings.values()):
        raise UserError(f"{path} has no rating; each pair is rated 1, 2, or 0 for a tie")
    return Filled(ratings, rater)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the filled sheet as --ratings") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it as CSV UTF-8, or send the file of the page") from None


def _entries(path: Path, text: str) -> tuple[Iterable[_Entry], str]:
    """The entries of a file, and the name of the rater if the file has one."""
    if not text.lstrip().startswith("{"):
        return _csv_entries(path, text), ""
    try:
        content = parse_json(text)
    except ValueError:
        return _jsonl_entries(path, text), ""
    if "ratings" not in content:  # A JSONL file of one pair.
        return _jsonl_entries(path, text), ""
    ratings, rater = content["ratings"], content.get("rater") or ""
    if not isinstance(ratings, list) or not all(isinstance(row, dict) for row in ratings) or not isinstance(rater, str):
        raise UserError(f"{path} has another form than the file of the page; {_AGAIN}")
    sheet = content.get("sheet")
    return [_Entry(sheet, row.get("id"), row.get("rating"), f"rating {i}") for i, row in enumerate(ratings, 1)], rater.strip()


def _jsonl_entries(path: Path, text: str) -> Iterable[_Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is no JSON object, so the file is cut short or damaged; {_AGAIN}")
        yield _entry(row, f"line {number}")


def _csv_entries(path: Path, text: str) -> Iterable[_Entry]:
    """Spreadsheet programs of some languages separate columns by semicolons or tabs."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    header = re.match(r'"?sheet"?([,;\t])', text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=header[1] if header else ",")
    try:
        names = next(reader, [])
        lacking = [name for name in ("sheet", "id", "rating") if name not in names]
        if lacking:
            raise UserError(f"{path} has no column {lacking[0]!r}; give a filled sheet.csv or sheet.jsonl, or the file that "
                            "the page saved")
        for cells in reader:
            if not any(cells):
                continue
            if len(cells) < len(names):
                raise UserError(f"{path}, line {reader.line_num} has {len(cells)} of {len(names)} columns, so the file is cut "
                                f"short or damaged; {_AGAIN}")
            yield _entry(dict(zip(names, cells, strict=False)), f"line {reader.line_num}")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num} is not CSV ({error}); {_AGAIN}") from None


def _entry(row: Mapping[str, Any], place: str) -> _Entry:
    return _Entry(row.get("sheet"), row.get("id"), row.get("rating"), place)


def _rating(value: Any, place: str) -> int | None:
    """The rating of a cell or of a JSON value; None for an empty one."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    if isinstance(value, bool) or text not in _VALUES:
        raise UserError(f"{place} has the rating {value!r}; 1 or 2 for the better answer, 0 or = for a tie, or nothing is "
                        "expected")
    return _VALUES[text]
