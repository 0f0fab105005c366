"""The format of a file of prompts follows from the ending of its name."""

import gzip

import pytest

from jaxalign.data.sources.prompts import read_prompts
from jaxalign.errors import UserError


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "A.CSV", "a.rows"])
@pytest.mark.parametrize("zipped", [False, True])
def test_equal_prompts_are_read_from_every_format(tmp_path, name, zipped):
    contents = {"jsonl": '{"prompt": "Why?"}\n"How?"\n', "json": '["Why?", "How?"]', "csv": "prompt\nWhy?\nHow?\n",
                "txt": "Why?\n\nHow?\n", "rows": '"Why?"\n"How?"\n'}
    raw = contents[name.lower().split(".")[1]].encode()
    path = tmp_path / (name + ".gz" if zipped else name)
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    assert [prompt.messages[0].content for prompt in read_prompts(path).prompts] == ["Why?", "How?"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_missing_empty_and_damaged_files_are_refused_in_one_sentence(tmp_path, name):
    with pytest.raises(UserError, match="does not exist; give the path"):
        read_prompts(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"has no prompts|is empty; a header row|is not JSON"):
        read_prompts(tmp_path / name)
    (tmp_path / name).write_bytes(gzip.compress(b'"Why?"\n' * 5000)[:-20])
    with pytest.raises(UserError, match="is damaged or cut short"):
        read_prompts(tmp_path / name)


def test_a_line_that_is_not_utf8_is_broken(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"Why?\ncaf\xe9\n")
    report = read_prompts(tmp_path / "a.txt", max_bad_share=0.5).report
    assert [(item.line, item.reason) for item in report.broken] == [(2, "not UTF-8 at byte 3")]
