"""CSV files with a header row: every row has the number of its first line, and a broken row does not stop the others."""

import gzip

import pytest

from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.prompts import read_prompts
from jaxalign.data.sources.rows import iterate_csv, open_indexed_rows, open_rows
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt


def write(path, content: str | bytes):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_rows_have_named_fields_and_the_number_of_their_first_line(tmp_path):
    text = 'prompt,label\r\n"Two\nlines, ""quoted""",safe\r\n\r\nWhy?,unsafe\r\n'
    expected = [
        JsonRow(2, {"prompt": 'Two\nlines, "quoted"', "label": "safe"}), JsonRow(5, {"prompt": "Why?", "label": "unsafe"}),
    ]
    assert list(iterate_csv(write(tmp_path / "a.csv", text))) == expected
    assert list(iterate_csv(write(tmp_path / "bom.csv", b"\xef\xbb\xbf" + text.encode()))) == expected
    assert list(iterate_csv(write(tmp_path / "a.csv.gz", gzip.compress(text.encode())))) == expected


def test_a_column_without_a_name_is_left_out(tmp_path):
    """As pandas writes its index."""
    assert list(iterate_csv(write(tmp_path / "a.csv", ",prompt\n0,Why?\n"))) == [JsonRow(2, {"prompt": "Why?"})]


@pytest.mark.parametrize(("row", "reason"), [
    ("Why?,safe,more", "3 fields; 2 as in the header row are expected"),
    ("Why?", "1 fields; 2"),
    ('"Why"?,safe', "not CSV: ',' expected after '\"'"),
    (b"caf\xe9,safe", "not UTF-8"),
])
def test_a_broken_row_is_reported_with_its_line(tmp_path, row, reason):
    row = row if isinstance(row, bytes) else row.encode()
    found = list(iterate_csv(write(tmp_path / "a.csv", b'prompt,label\n"a\nb",x\n' + row + b"\nlast,y\n")))
    assert [item.line for item in found] == [2, 4, 5] and isinstance(found[1], BrokenLine) and reason in found[1].reason
    assert found[2] == JsonRow(5, {"prompt": "last", "label": "y"})


@pytest.mark.parametrize(("content", "sentence"), [
    ("", r"a\.csv is empty; a header row"),
    ("\n\n", r"a\.csv is empty; a header row"),
    ("a,b,a\n1,2,3\n", r"a\.csv:1: the header row has the column 'a' twice"),
    ("prompt;answer\nWhy?;x\n", r"a\.csv:1: the header row separates columns by ';'; separate them by commas"),
    (b"prompt,caf\xe9\n", r"a\.csv:1: the header row is not UTF-8"),
    ('prompt,label\nWhy?,safe\n"How?,safe\nWhen?,safe\n', r"a\.csv has a quote in the row of line 3 that is not closed"),
])
def test_a_file_without_usable_columns_is_refused_in_one_sentence(tmp_path, content, sentence):
    with pytest.raises(UserError, match=sentence):
        list(iterate_csv(write(tmp_path / "a.csv", content)))


@pytest.mark.parametrize(("name", "field", "sentence"), [
    ("pairs.csv", "", r"pairs.csv is a .csv file, from which only prompts are read; save its rows as .jsonl or .parquet"),
    ("pairs.csv.gz", "", "is a .csv file, from which only prompts are read"),
    ("prompts.tsv", "prompt", "is a .tsv file, which is not read; save its rows as .jsonl or .parquet"),
])
def test_a_table_that_is_not_read_is_refused_by_its_format(tmp_path, name, field, sentence):
    path = write(tmp_path / name, "chosen,rejected\nyes,no\n")
    for open_data in (open_rows, open_indexed_rows):
        with pytest.raises(UserError, match=sentence):
            open_data(path, prompt_field=field)


def test_prompts_are_read_by_the_name_of_the_column(tmp_path):
    path = write(tmp_path / "x.csv", "id,prompt,label\n1,Why?,safe\n2,How?,unsafe\n3,Why?,safe\n4,,safe\n")
    prompts, report = read_prompts(path, max_bad_share=0.25)
    assert prompts == [Prompt("x.csv:2", (Message("user", "Why?"),), "file", {"id": "1", "label": "safe"}),
                       Prompt("x.csv:3", (Message("user", "How?"),), "file", {"id": "2", "label": "unsafe"})]
    assert (report.rows, report.duplicates, [item.line for item in report.broken]) == (4, (4,), [5])
    with pytest.raises(UserError, match=r"1 of 4 lines of .*x\.csv are broken.*x\.csv:5: the prompt does not end"):
        read_prompts(path, max_bad_share=0.2)
    alpaca = write(tmp_path / "alpaca.csv", "instruction,input\nSort.,3 1 2\nSay hi.,\n")
    assert [p.messages[0].content for p in read_prompts(alpaca).prompts] == ["Sort.\n\n3 1 2", "Say hi."]
    own = write(tmp_path / "own.csv", "prompt,request\na,b\n")
    (prompt,), _ = read_prompts(own, field="request")
    assert prompt.messages == (Message("user", "b"),) and prompt.columns == {"prompt": "a"}


def test_messages_are_a_json_list_and_other_text_is_not_interpreted(tmp_path):
    path = write(tmp_path / "m.csv", 'messages\n"[{""role"": ""system"", ""content"": ""Be kind.""}, '
                 '{""role"": ""user"", ""content"": ""Hi""}]"\n"[{\'role\': \'user\'}]"\n')
    prompts, report = read_prompts(path, max_bad_share=0.5)
    assert [p.messages for p in prompts] == [(Message("system", "Be kind."), Message("user", "Hi"))]
    assert '"messages" is not JSON' in report.broken[0].reason
    (prompt,), _ = read_prompts(write(tmp_path / "p.csv", "prompt\n[1]\n"))
    assert prompt.messages == (Message("user", "[1]"),)


def test_a_published_benchmark_is_read(real_data):
    """XSTest has 250 safe and 200 unsafe prompts."""
    path = real_data / "prompts" / "xstest_prompts.csv"
    if not path.is_file():
        pytest.skip("XSTest is absent")
    prompts, report = read_prompts(path)
    assert report.rows == report.prompts == 450 and not report.broken
    labels = [prompt.columns["label"] for prompt in prompts]
    assert (labels.count("safe"), labels.count("unsafe")) == (250, 200)
