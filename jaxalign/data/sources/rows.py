"""Opens the rows of data: the one place that knows every format.

- JSON Lines or one JSON array, optionally gzipped, or a folder of such files;
- for prompts also .txt, .csv and .json files;
- a Parquet or Arrow file, or a folder of such files;
- a folder that `datasets.Dataset.save_to_disk` wrote;
- "tfds:NAME[/CONFIG][:VERSION][:SPLIT]", a prepared data set of TFDS.

Files of a folder are read in the order of their names.
"""

from __future__ import annotations

import csv
import functools
import io
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.data.sources.arrow_parts import ARROW_MAGIC, FEATHER_MAGIC, PARQUET_MAGIC, arrow_part, check_schemas
from jaxalign.data.sources.indexed_lines import IndexedLines
from jaxalign.data.sources.json_items import read_array, read_items
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, iterate_jsonl, read_bytes, read_object
from jaxalign.data.sources.row_files import ColumnMap, ListedRows, RowFile, TextFolder, TextRows
from jaxalign.data.sources.tables import TableRows
from jaxalign.data.sources.tfds_part import PREFIX, TfdsPart, is_tfds, parse_name, prepared_files
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_TABLES = (".parquet", ".arrow", ".feather")
_LINES = (".jsonl",)
_LISTED = (".txt", ".csv", ".json")
_SHEETS = (".tsv", ".xlsx", ".xls", ".ods")
_COMPRESSED = (".zst", ".bz2", ".xz", ".zip")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?:ing|s|uation)?(?![a-z])", re.IGNORECASE)
"""The split of a file, at the beginning of its name."""


def open_rows(path: str | pathlib.Path, columns: Sequence[str] = (), prompt_field: str = "") -> RowFile:
    """The rows of a file, a folder or a TFDS data set. They are read when they are needed, not held in memory.

    Args:
      path: any of the formats above.
      columns: the entries of `config.data.columns`, "field=column".
      prompt_field: the field that contains the prompt; then rows may be strings, and the other formats of prompts are read.

    Returns:
      The rows; those of a table (Parquet, Arrow, TFDS) also by index.

    Raises:
      UserError: a table is missing or damaged, its parts have different columns, a mapped column does not exist, or the package
        that reads the format is not installed. Text files raise it when their rows are read.
    """
    mapped = ColumnMap.of(columns)
    if is_tfds(path):
        return TableRows(path, [TfdsPart(path)], mapped)
    path = pathlib.Path(path).expanduser()
    if path.is_dir():
        return _folder(path, mapped, prompt_field)
    if _is_table(path):
        return TableRows(path, [arrow_part(path)], mapped)
    return _text(path, mapped, prompt_field)


def open_indexed_rows(
    path: str | pathlib.Path, columns: Sequence[str] = (), prompt_field: str = ""
) -> TableRows | IndexedLines | ListedRows:
    """The rows of data by index. Takes the arguments of `open_rows`.

    One pass indexes JSON Lines. JSON arrays, and prompts in .txt, .csv and .json files, are held in memory.

    Raises:
      UserError: as `open_rows`, or a text file is missing, unreadable or zipped.
    """
    rows = open_rows(path, columns, prompt_field)
    if isinstance(rows, TableRows):
        return rows
    path = pathlib.Path(path).expanduser()
    if rows.unit == "item" or (prompt_field and not path.is_dir() and _ending(path) in _LISTED):
        return ListedRows(rows)
    return IndexedLines(path, _folder_files(path) if path.is_dir() else [path], ColumnMap.of(columns), bool(prompt_field))


def data_stem(path: str | pathlib.Path) -> str:
    """The name of data for ids: of a file its name without .jsonl, .parquet, .arrow, .feather and .gz, of a folder its name, of
    TFDS the name and config, with the split unless that is train."""
    if is_tfds(path):
        return parse_name(path).stem
    name = pathlib.Path(path).name.removesuffix(".gz")
    return next((name.removesuffix(ending) for ending in (*_LINES, *_TABLES) if name.endswith(ending)), name)


def data_identity(path: str | pathlib.Path) -> tuple[str, list[pathlib.Path]]:
    """(the identity of the data apart from its files, the files): for a folder those that are read, for TFDS those of the
    prepared folder. Raises UserError like `open_rows`."""
    if is_tfds(path):
        name, files = prepared_files(path)
        return f"{PREFIX}{name}:{parse_name(path).split}", files
    path = pathlib.Path(path).expanduser()
    return "", _folder_files(path) if path.is_dir() else [path]


def is_table(path: str | pathlib.Path) -> bool:
    """Whether a path is a folder, the name of a TFDS data set, or a Parquet or Arrow file by its ending or first bytes."""
    path = pathlib.Path(path).expanduser()
    return is_tfds(path) or path.is_dir() or _is_table(path)


def _is_table(path: pathlib.Path) -> bool:
    """Whether a file is Parquet or Arrow, by its ending or its first bytes."""
    if path.suffix.lower() in _TABLES:
        return True
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(8).startswith((PARQUET_MAGIC, ARROW_MAGIC, FEATHER_MAGIC))
    except OSError:
        return False  # The reader of text files names the reason.


def _folder(path: pathlib.Path, mapped: ColumnMap, prompt_field: str) -> RowFile:
    """The rows of a folder: a table of its files if it holds tables or a saved data set, otherwise their texts in order."""
    files = _folder_files(path)
    if (path / _STATE).is_file() or files[0].suffix.lower() in _TABLES:
        parts = [arrow_part(file) for file in files]
        check_schemas(parts)
        return TableRows(path, parts, mapped)
    return TextFolder(path, [_text(file, mapped, prompt_field) for file in files])


def _folder_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The data files of a folder in order. Raises UserError if there are none, or files of several formats or splits, or of a
    compression that is not read."""
    if (path / _STATE).is_file():  # Of `datasets.Dataset.save_to_disk`: it lists the files in order.
        listed = read_object(path / _STATE).get("_data_files")
        names = [file.get("filename") for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []
        if not names or not all(isinstance(name, str) and name and pathlib.Path(name).name == name for name in names):
            raise UserError(f"{path / _STATE} does not list the data files of a saved data set; save the data set again")
        if missing := [name for name in names if not (path / name).is_file()]:
            raise UserError(f"{len(missing)} of the {len(names)} data files that {path / _STATE} lists cannot be found, the "
                            f"first is {path / missing[0]}; copy all files of the saved data set")
        return [path / name for name in names]
    if (path / _SPLITS).is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / _STATE).is_file())
        raise UserError(f"{path} has the splits {', '.join(splits) or '(none)'} of a saved data set; give the folder of one of "
                        f"them, such as {path / (splits[0] if splits and 'train' not in splits else 'train')}")
    found: dict[str, list[pathlib.Path]] = {}
    for file in sorted(path.iterdir()):
        ending = _ending(file)
        if not file.is_file() or file.name[0] in "._":
            continue
        unpacked = file.with_suffix("")
        if ending in _COMPRESSED and _ending(unpacked) in (*_TABLES, *_LINES) and not unpacked.exists():
            raise UserError(f"{file} is compressed as {ending}, which is not read; unpack it, or compress it with gzip")
        if ending in (*_TABLES, *_LINES):
            found.setdefault("JSON Lines" if ending in _LINES else ending, []).append(file)
    if not found:
        raise UserError(f"{path} is a folder without .jsonl, .parquet, .arrow or .feather files; give a folder that has some, "
                        "or the path of one file in it")
    if len(found) > 1:
        raise UserError(f"{path} has files of several formats ({', '.join(found)}); give a folder with one format, or one file")
    files = next(iter(found.values()))
    splits = sorted({match[1].lower() for file in files if (match := _SPLIT.match(file.name))})
    if len(splits) > 1 and "train" in splits:
        raise UserError(f"{path} has files of several splits ({', '.join(splits)}); give one file, or a folder with the files "
                        "of one split")
    return files


def _ending(path: pathlib.Path) -> str:
    """The ending of a file's name, in lower case and without .gz."""
    return pathlib.Path(path.name.lower().removesuffix(".gz")).suffix


def _text(path: pathlib.Path, mapped: ColumnMap, prompt_field: str) -> RowFile:
    """The rows of a text file. Raises UserError if it is a table in a text or spreadsheet format that is not read."""
    if path.is_file() and ((ending := _ending(path)) in _SHEETS or (ending == ".csv" and not prompt_field)):
        reason = "from which only prompts are read" if ending == ".csv" else "which is not read"
        raise UserError(f"{path} is a {ending} file, {reason}; save its rows as .jsonl or .parquet, such as with pandas")
    ending = _ending(path) if prompt_field else ""
    read, unit = functools.partial(iterate_jsonl, path, strings=bool(prompt_field)), "line"
    if ending == ".txt":
        read = functools.partial(_text_lines, path)
    elif ending == ".csv":
        read = functools.partial(iterate_csv, path)
    elif ending == ".json" and (items := read_items(path, mapped.fields.get(prompt_field, prompt_field))) is not None:
        read, unit = items.__iter__, "item"
    elif not prompt_field and path.is_file() and (items := read_array(path)) is not None:
        read, unit = items.__iter__, "item"
    return TextRows(path, read, mapped, unit)


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


_UNREADABLE = ("unexpected end of data", "field larger than field limit")
"""Errors of a quote that is not closed: the reader has taken all later rows for one field."""


def iterate_csv(path: str | pathlib.Path) -> Iterator[JsonRow | BrokenLine]:
    """Yields each row of a CSV file (RFC 4180) with a header row, in file order: a JsonRow with an object of strings, or a
    BrokenLine. A row has the number of its first line.

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
