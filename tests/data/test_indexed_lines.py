"""Rows of JSON Lines by index are those that are read in order."""

from __future__ import annotations

import gzip
import json

import pytest

from jaxalign.data.sources.rows import open_indexed_rows, open_rows
from jaxalign.errors import UserError


def write(path, lines, begin=b""):
    path.write_bytes(begin + b"\n".join(lines))
    return path


def test_rows_by_index_are_those_in_order(tmp_path):
    """More rows than are read together, with blank and broken lines, a byte order mark, and no newline at the end."""
    lines = [json.dumps({"prompt": f"question {i}"}).encode() for i in range(2100)]
    lines[3:3], lines[1500:1500] = [b"", b"  "], [b"{broken"]
    path = write(tmp_path / "rows.jsonl", lines, b"\xef\xbb\xbf")
    rows = open_indexed_rows(path)
    assert len(rows) == 2101 and list(rows) == list(open_rows(path))
    for index in (2100, 0, 1498, 1023, 1024):
        assert rows[index] == list(open_rows(path))[index]
    assert rows[0].value == {"prompt": "question 0"} and rows[3].line == 6
    with pytest.raises(IndexError):
        rows[2101]


def test_lines_are_numbered_through_the_files_of_a_folder(tmp_path):
    write(tmp_path / "a.jsonl", [b'{"q": "1"}', b"", b'{"q": "2"}', b""])
    write(tmp_path / "b.jsonl", [b'{"q": "3"}'], b"\xef\xbb\xbf")
    rows = open_indexed_rows(tmp_path, ["prompt=q"])
    assert [(row.line, row.value["prompt"]) for row in rows] == [(1, "1"), (3, "2"), (4, "3")]
    assert [rows.place(row.line) for row in rows] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"]


def test_the_items_of_a_json_array_are_rows_by_index(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"q": str(i)} for i in range(3)], indent=2))
    rows = open_indexed_rows(path, ["prompt=q"])
    assert [(row.line, row.value["prompt"]) for row in (rows[2], rows[0])] == [(3, "2"), (1, "0")]
    assert len(rows) == 3 and rows.place(2) == f"{path}, item 2"


def test_what_cannot_be_indexed_is_refused(tmp_path):
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"q": "1"}\n'))
    with pytest.raises(UserError, match=r"is zipped.*unzip it, convert it to Parquet, or set config.data.window to 0"):
        open_indexed_rows(zipped)
    path = write(tmp_path / "rows.jsonl", [b'{"q": "1"}'])
    with pytest.raises(UserError, match="has no column 'question'"):
        open_indexed_rows(path, ["prompt=question"])
    with pytest.raises(UserError, match="does not exist"):
        open_indexed_rows(tmp_path / "none.jsonl")
