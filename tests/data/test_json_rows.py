"""JSON files of prompts: one array, an object of arrays, or one value per line. Numbers are positions in the array."""

import gzip
import json

import pytest

from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.data.sources.prompts import read_prompts
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt


def write(path, content):
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    path.write_text(text, encoding="utf-8")
    return path


def texts(path, **options):
    return [prompt.messages[-1].content for prompt in read_prompts(path, **options).prompts]


def test_an_array_has_strings_and_objects(tmp_path):
    rows = [{"instruction": "Sort.", "input": "3 1", "output": "1 3"}, {"instruction": "Add.", "input": "", "output": "?"}]
    path = write(tmp_path / "a.json", rows)
    prompts, report = read_prompts(path)
    assert prompts == [Prompt("a.json:1", (Message("user", "Sort.\n\n3 1"),), "file", {"output": "1 3"}),
                       Prompt("a.json:2", (Message("user", "Add."),), "file", {"output": "?"})]
    assert report.unit == "item" and report.sentences() == [f"{path}: 2 rows read, 2 prompts kept"]
    assert texts(write(tmp_path / "b.json", "\ufeff" + json.dumps(["Why?", "How?"]))) == ["Why?", "How?"]
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert texts(tmp_path / "c.json.gz") == ["Sort.\n\n3 1", "Add."]


def test_arrays_by_topic_are_read_in_order(tmp_path):
    topics = {"A": {"x": ["1", "2"], "y": ["3"]}, "B": {"z": [{"prompt": "4"}]}}
    assert texts(write(tmp_path / "a.json", topics)) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", [
    '{"prompt": "1"}\n{"prompt": "2"}\n', '{"messages": [{"role": "user", "content": "1"}]}\n"2"'])
def test_one_value_per_line_is_read_too(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    assert texts(path) == ["1", "2"] and read_prompts(path).report.unit == "line"
    assert texts(write(tmp_path / "one.json", text.split("\n")[0])) == ["1"]


def test_a_broken_item_is_reported_with_its_position(tmp_path):
    path = write(tmp_path / "a.json", '["1", 2, "\\ud800", {"other": "x"}, "5", "1"]')
    prompts, report = read_prompts(path, max_bad_share=0.5)
    assert [prompt.id for prompt in prompts] == ["a.json:1", "a.json:5"]
    assert report.broken[0] == BrokenLine(2, "a JSON int; an object {...} is expected")
    assert [item.line for item in report.broken] == [2, 3, 4]
    assert report.sentences()[1:-1] == ["3 broken; dropped (items 2, 3, 4); item 2: a JSON int; an object {...} is expected",
                                        "1 with the dialogue of an earlier row; dropped (items 6)"]
    with pytest.raises(UserError, match=r"3 of 6 items of .*a\.json are broken.*a\.json, item 2: a JSON int.*item 3: has half"):
        read_prompts(path, max_bad_share=0.1)


@pytest.mark.parametrize(("content", "sentence"), [
    ('["a",\n "b"', r"a\.json is not JSON: .* on line 2, column 5"),
    ("", r"a\.json is not JSON: .* on line 1"),
    ("[]", r"a\.json has no prompts"),
    ("3", "has a JSON int outside an array"),
    ({"A": {"x": "text"}}, "has a JSON str outside an array"),
    ({"prompt": ["a", "b"], "label": ["x", "y"]}, "has an object with the fields prompt, label outside an array"),
])
def test_other_json_is_refused_in_one_sentence(tmp_path, content, sentence):
    with pytest.raises(UserError, match=sentence):
        read_prompts(write(tmp_path / "a.json", content))


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "a.json").write_bytes(b'["a",\n"caf\xe9"]')
    with pytest.raises(UserError, match=r"a\.json is not UTF-8 on line 2"):
        read_prompts(tmp_path / "a.json")


def test_published_files_are_read(real_data):
    """HarmfulQA has 1,960 questions in 98 topics."""
    path = real_data / "prompts" / "harmfulqa.json"
    if not path.is_file():
        pytest.skip("HarmfulQA is absent")
    assert read_prompts(path).report.rows == 1960
