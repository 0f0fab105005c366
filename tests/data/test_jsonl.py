"""Reading of JSONL: rows, broken lines, and errors in one sentence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os

import pytest

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, read_jsonl
from jaxalign.errors import UserError

_ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
_TEXT = "".join(json.dumps(row) + "\n" for row in _ROWS)


def _write(path, content: str | bytes):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_plain_and_gzipped_files_give_the_same_rows(tmp_path):
    plain = _write(tmp_path / "a.jsonl", _TEXT)
    zipped = _write(tmp_path / "b.jsonl.gz", gzip.compress(_TEXT.encode()))
    expected = ([JsonRow(1, _ROWS[0]), JsonRow(2, _ROWS[1]), JsonRow(3, _ROWS[2])], [])
    assert read_jsonl(plain) == expected
    assert read_jsonl(str(zipped)) == expected


def test_gzip_is_recognised_by_content_not_by_name(tmp_path):
    zipped = _write(tmp_path / "named.jsonl", gzip.compress(_TEXT.encode()))
    plain = _write(tmp_path / "named.jsonl.gz", _TEXT)
    assert [row.value for row in read_jsonl(zipped)[0]] == _ROWS
    assert [row.value for row in read_jsonl(plain)[0]] == _ROWS


def test_blank_lines_count_as_lines_but_not_as_rows_or_broken_lines(tmp_path):
    path = _write(tmp_path / "a.jsonl", '\n{"a": 1}\n  \n\n{"a": 2}')
    rows, broken = read_jsonl(path)
    assert [(row.line, row.value["a"]) for row in rows] == [(2, 1), (5, 2)]
    assert broken == []


def test_windows_line_ends_a_byte_order_mark_and_unicode_line_separators(tmp_path):
    path = _write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + '{"a": "x\u2028y\u0085z"}\r\n{"a": "b"}\r\n'.encode())
    rows, _ = read_jsonl(path)
    assert [row.value["a"] for row in rows] == ["x\u2028y\u0085z", "b"]
    assert [row.line for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b"[1, 2]", "a JSON list; an object {...} is expected"),
        (b"null", "a JSON NoneType; an object {...} is expected"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"a": ' + b"[" * 200_000 + b"}", "not JSON: nested too deeply"),
    ],
)
def test_a_broken_line_is_listed_with_its_number_and_reason(tmp_path, line, reason):
    path = _write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    rows, broken = read_jsonl(path, max_bad_share=0.5)
    assert [row.line for row in rows] == [1, 3]
    assert [item.line for item in broken] == [2]
    assert reason in broken[0].reason


def test_a_complete_surrogate_pair_is_one_character(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"a": "\\ud83d\\ude00"}\n')
    assert read_jsonl(path)[0][0].value == {"a": "\U0001f600"}


def test_too_many_broken_lines_are_an_error_with_file_line_and_count(tmp_path):
    path = _write(tmp_path / "a.jsonl", _TEXT + "oops\n")
    rows, broken = read_jsonl(path, max_bad_share=0.25)  # exactly one in four is accepted
    assert len(rows) == 3
    assert broken == [BrokenLine(4, "not JSON: Expecting value at column 1")]
    with pytest.raises(UserError, match=r"1 of 4 lines of .*a\.jsonl are broken.*share 0\.24.*a\.jsonl:4: not JSON"):
        read_jsonl(path, max_bad_share=0.24)


def test_a_long_list_of_broken_lines_is_shortened_to_a_count(tmp_path):
    path = _write(tmp_path / "a.jsonl", "".join("[" * column + "oops\n" for column in range(8)))
    with pytest.raises(UserError, match="and 3 more") as caught:
        read_jsonl(path)
    assert str(caught.value).count("not JSON") == 5


def test_broken_lines_with_one_reason_are_listed_once_with_their_number(tmp_path):
    path = _write(tmp_path / "a.jsonl", "oops\n[]\noops\n[]\noops\n{}\n")
    with pytest.raises(UserError, match=r"\(.*a.jsonl:1 and 2 other lines: not JSON: .*; .*:2 and 1 other line: a JSON list;"):
        read_jsonl(path)


def test_errors_of_missing_folders_and_empty_files_have_a_remedy(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl does not exist; give the path"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder; give the path of one"):
        read_jsonl(tmp_path)
    with pytest.raises(UserError, match="has no rows"):
        read_jsonl(_write(tmp_path / "empty.jsonl", "\n\n"))
    with pytest.raises(UserError, match="has no rows"):
        read_jsonl(_write(tmp_path / "zero.jsonl.gz", b""))


def test_a_truncated_or_damaged_gzip_file_is_reported_in_one_sentence(tmp_path):
    whole = gzip.compress("".join(json.dumps({"n": n, "hash": hash(n * 7919)}) + "\n" for n in range(5000)).encode())
    with pytest.raises(UserError, match="damaged or cut short after line"):
        read_jsonl(_write(tmp_path / "short.jsonl.gz", whole[: len(whole) // 2]))
    damaged = bytearray(whole)
    damaged[-8:-4] = bytes(4)  # the checksum
    with pytest.raises(UserError, match="damaged or cut short"):
        read_jsonl(_write(tmp_path / "damaged.jsonl.gz", bytes(damaged)))


@pytest.mark.parametrize(("pack", "kind"), [
    (bz2.compress, "compressed with bzip2"), (lzma.compress, "compressed with xz"),
    (lambda data: data.decode().encode("utf-16"), "UTF-16 text"),
    (lambda data: bytes.fromhex("28b52ffd") + data, "compressed with zstd"),  # The magic number of RFC 8878.
])
def test_other_compressions_and_encodings_are_named(tmp_path, pack, kind):
    with pytest.raises(UserError, match=f"rows.jsonl is {kind}.*, which is not read; give UTF-8 text"):
        read_jsonl(_write(tmp_path / "rows.jsonl", pack(b'{"n": 1}\n')))


def test_a_pipe_is_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="is a pipe, a socket or a device; give the path of a regular file"):
        read_jsonl(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 2500, "a\x00b"])
def test_a_path_that_no_file_can_have_does_not_exist(path):
    with pytest.raises(UserError, match="does not exist"):
        read_jsonl(path)
