"""Rows of Parquet and Arrow files, folders and saved data sets are those of JSON Lines, and their errors name places."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from jaxalign.data.sources.base import split_by_prompt
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.judgements import read_judgements
from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.sources.prompts import read_prompts
from jaxalign.data.sources.rows import data_identity, data_stem, open_rows
from jaxalign.data.sources.sequence import read_rows
from jaxalign.errors import UserError
from tests import table_files

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"messages": [{"role": "user", "content": f"Über {i}?"}, {"role": "assistant", "content": f"{i}."}], "score": i / 2,
     "tags": ["a"] * (i % 3)} | ({} if i % 2 else {"note": f"n{i}"})
    for i in range(20)
]


def write(folder, form):
    if form == "saved":
        pytest.importorskip("datasets")
        return table_files.save_dataset(folder / "rows", ROWS)
    if form == "folder":
        return table_files.write_parquet_folder(folder / "rows", ROWS, 12)
    return table_files.write_arrow(folder / "rows.arrow", ROWS, stream=form == "stream")


@pytest.mark.parametrize("form", ["folder", "file", "stream", "saved"])
def test_rows_are_equal_in_order_and_by_index(tmp_path, form):
    rows = open_rows(write(tmp_path, form))
    expected = [JsonRow(number, row) for number, row in enumerate(ROWS, start=1)]
    assert list(rows) == expected and len(rows) == 20
    assert [rows[i] for i in (13, 0, 19, 12, 6, 7, -1)] == [expected[i] for i in (13, 0, 19, 12, 6, 7, -1)]
    with pytest.raises(IndexError):
        rows[20]


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").is_dir(), reason="counts open files by /proc")
def test_few_files_of_a_folder_are_open_at_a_time(tmp_path):
    """An open Parquet file has a buffer for each column: 100 files took 400 MB, and 1,024 more than a process may open."""
    for number in range(20):
        parquet.write_table(pa.table({"text": [f"{number}-{row}" for row in range(3)]}), tmp_path / f"{number:02}.parquet")
    rows = open_rows(tmp_path)
    numbers = [3 * number + 1 for number in range(20)] * 2
    assert [rows[i].value["text"] for i in numbers] == [f"{i // 3}-1" for i in numbers]
    opened = [path.resolve().parent for path in pathlib.Path("/proc/self/fd").iterdir()]
    assert 0 < opened.count(tmp_path.resolve()) <= 4
    assert len(list(rows)) == 60


def test_places_name_the_file_and_its_row(tmp_path):
    rows = open_rows(table_files.write_parquet_folder(tmp_path / "rows", ROWS, 12))
    assert [rows.place(number).removeprefix(str(tmp_path)) for number in (1, 12, 13)] == [
        "/rows/train-00000.parquet row 1", "/rows/train-00000.parquet row 12", "/rows/train-00001.parquet row 1"]
    assert data_stem(tmp_path / "rows") == "rows" and data_stem("a/b.parquet") == data_stem("b.arrow") == "b"


def test_a_folder_of_json_lines_is_read_like_one_file(tmp_path):
    for name, rows in (("b.jsonl", ROWS[12:]), ("a.jsonl", ROWS[:12])):
        table_files.write_jsonl(tmp_path / name, rows)
    (tmp_path / "b.jsonl").write_text("\n" + (tmp_path / "b.jsonl").read_text() + "{\n")
    rows = open_rows(tmp_path)
    found = list(rows)
    assert [row.value for row in found[:-1]] == ROWS and isinstance(found[-1], BrokenLine)
    assert [rows.place(row.line) for row in (found[11], found[12], found[-1])] == [
        f"{tmp_path}/a.jsonl:12", f"{tmp_path}/b.jsonl:2", f"{tmp_path}/b.jsonl:10"]


def test_every_reader_gives_the_records_of_json_lines(tmp_path):
    pairs = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no" if i != 3 else "yes", "margin": float(i)} for i in range(9)]
    judged = [{"prompt": f"q{i}", "completion": "yes", "label": i % 2 == 0} for i in range(9)]
    answered = [{"messages": row["messages"]} for row in ROWS]
    asked = [{"prompt": f"q{i % 7}", "answer": str(i), "level": i} for i in range(9)]
    for number, (rows, read) in enumerate((
        (pairs, lambda path: read_preferences(path, margins=True)),
        (judged, read_judgements),
        (answered, lambda path: read_judgements(path, judged=False)),
        (asked, read_prompts),
        (asked, lambda path: read_prompts(path, limit=4, columns=False)),
    )):
        folder = tmp_path / str(number)
        folder.mkdir()
        records, report = read(table_files.write_parquet_folder(folder / "rows", rows, 5))
        expected, lines = read(table_files.write_jsonl(folder / "rows.jsonl", rows))
        assert list(records) == list(expected)
        assert report.to_dict() | {"path": "", "unit": ""} == lines.to_dict() | {"path": "", "unit": ""}


def test_a_report_on_json_lines_has_no_unit_and_one_on_a_table_counts_rows(tmp_path):
    pairs = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "yes" if i == 3 else "no"} for i in range(9)]
    _, report = read_preferences(table_files.write_parquet_folder(tmp_path / "rows", pairs, 5))
    assert report.to_dict()["unit"] == "row" and report.sentences()[-1].endswith("(rows 4)")
    assert "unit" not in read_preferences(table_files.write_jsonl(tmp_path / "rows.jsonl", pairs))[1].to_dict()


def test_an_empty_cell_of_a_prompt_column_is_none(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    prompts, _ = read_prompts(table_files.write_parquet_folder(tmp_path / "rows", rows, 1))
    assert [prompt.columns for prompt in prompts] == [{"answer": "1"}, {"answer": None}]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_are_mapped_and_unknown_ones_are_refused(tmp_path, form):
    rows = [{"question": "Why?", "good": "A", "bad": "B", "chosen": "unused"}]
    path = (table_files.write_jsonl(tmp_path / "a.jsonl", rows) if form == "jsonl"
            else table_files.write_parquet_folder(tmp_path / "a", rows, 1))
    mapping = ("prompt=question", "chosen=good", "rejected=bad")
    assert next(iter(open_rows(path, mapping))).value == {"prompt": "Why?", "chosen": "A", "rejected": "B"}
    pairs, _ = read_preferences(path, columns=mapping)
    assert (pairs[0].response_a, pairs[0].response_b) == ("A", "B")
    with pytest.raises(UserError, match=r"prompt=qestion, but .* has no column 'qestion'; its columns are question, good, bad, "
                                        r"chosen: did you mean 'question'\?"):
        read_preferences(path, columns=("prompt=qestion",))


def test_values_without_an_equivalent_in_json(tmp_path):
    table = pa.table({
        "text": pa.array([b"ok", b"\xff"], pa.binary()), "day": pa.array([0, 1], pa.date32()),
        "rate": [float("nan"), 0.5], "kind": pa.array(["a", "b"]).dictionary_encode(),
    })
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.value for row in open_rows(tmp_path / "a.parquet")] == [
        {"text": "ok", "day": "1970-01-01", "kind": "a"}, {"day": "1970-01-02", "rate": 0.5, "kind": "b"}]


def test_a_text_that_is_not_utf8_is_a_broken_row(tmp_path):
    bad = pa.array([b"good", b"\xff", b"fine"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema([("prompt", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([text], names=["prompt"]))
    prompts, report = read_prompts(tmp_path / "a.arrow", max_bad_share=0.5)
    assert [prompt.id for prompt in prompts] == ["a:1", "a:3"]
    assert [(row.line, row.reason) for row in report.broken] == [(2, "a text is not UTF-8")]


def damaged(tmp_path, act):
    folder = table_files.write_parquet_folder(tmp_path / "rows", ROWS, 12)
    second = folder / "train-00001.parquet"
    content = second.read_bytes()
    table = pa.Table.from_pylist(ROWS[12:])
    if act == "cut":
        second.write_bytes(content[: len(content) // 2])
    elif act == "empty":
        second.write_bytes(b"")
    elif act == "changed":
        second.write_bytes(content[:8] + bytes(200) + content[208:])
    elif act == "column":
        parquet.write_table(table.rename_columns(["turns", *table.column_names[1:]]), second)
    elif act == "type":
        parquet.write_table(table.set_column(1, "score", [[str(i) for i in range(8)]]), second)
    elif act == "formats":
        (folder / "more.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize(("act", "message"), [
    ("cut", r"train-00001\.parquet is damaged or cut short \(.*\); download or copy it again$"),
    ("empty", r"train-00001\.parquet is empty; download or copy it again$"),
    ("changed", r"train-00001\.parquet is damaged or cut short \(.*\); download or copy it again$"),
    ("column", r"00001\.parquet has the columns turns, score, tags, note, but .*00000\.parquet before it has messages, "),
    ("type", r"00001\.parquet has the column 'score' of type string, but in .*00000\.parquet before it the type is double"),
    ("formats", r"has files of several formats \(JSON Lines, \.parquet\); give a folder with one format, or one file$"),
])
def test_damaged_data_is_refused_in_one_sentence_that_names_the_file(tmp_path, act, message):
    with pytest.raises(UserError, match=message) as raised:
        list(open_rows(damaged(tmp_path, act)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("names", "message"), [
    (["train.jsonl.gz", "test.jsonl"], r"has files of several splits \(test, train\)"),
    (["test_prefs-00000-of-00001.jsonl", "train_prefs-00000-of-00001.jsonl"], "a folder with the files of one split"),
    (["a.jsonl", "b.jsonl.zst"], r"b.jsonl.zst is compressed as .zst, which is not read"),
])
def test_a_folder_of_several_splits_or_with_files_that_cannot_be_read_is_refused(tmp_path, names, message):
    """Else a run would train on the test split, or leave a file out without a word."""
    for name in names:
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=message):
        open_rows(tmp_path)
    for name in ("training-notes.jsonl", "testament.jsonl", "train-2.jsonl"):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text('{"prompt": "a"}\n')
    assert len(list(open_rows(tmp_path / "other"))) == 3


def test_other_mistakes_are_refused(tmp_path, monkeypatch):
    cut = table_files.write_arrow(tmp_path / "a.arrow", ROWS, stream=True)
    cut.write_bytes(cut.read_bytes()[:-2000])
    (tmp_path / "none").mkdir()
    (tmp_path / "splits").mkdir()
    table_files.save_dataset(tmp_path / "splits" / "test", ROWS)
    table_files.save_dataset(tmp_path / "splits" / "train", ROWS)
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text("{}")
    for path, message in (
        (cut, "damaged or cut short"), (tmp_path / "x.parquet", "does not exist"), (tmp_path / "none", "is a folder without"),
        (tmp_path / "splits", "has the splits test, train of a saved data set; .* such as .*/train$"),
        (tmp_path / "state", "does not list the data files"),
    ):
        with pytest.raises(UserError, match=message):
            list(open_rows(path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow; install it with pip install 'jaxalign\[data\]'"):
        open_rows(tmp_path / "x.parquet")


def test_the_identity_of_a_folder_are_the_files_that_are_read(tmp_path):
    pytest.importorskip("datasets")
    folder = table_files.save_dataset(tmp_path / "rows", ROWS)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [file.name for file in data_identity(folder)[1]] == names
    (folder / names[1]).unlink()
    with pytest.raises(UserError, match=f"^1 of the 2 data files that .*state.json lists cannot .*the first is .*/{names[1]};"):
        open_rows(folder)


def test_read_rows_is_a_sequence_of_dictionaries(tmp_path):
    rows = read_rows(table_files.write_parquet_folder(tmp_path / "rows", ROWS, 12), columns={"turns": "messages"})
    assert len(rows) == 20 and rows[-1]["turns"] == ROWS[-1]["messages"] and len(rows[5:8]) == 3 and len(list(rows)) == 20
    lines = read_rows(table_files.write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert list(lines) == ROWS and lines[3] == ROWS[3]
    (tmp_path / "a.jsonl").write_text('{"prompt": 1}\n{\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: not JSON"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_records_of_a_table_are_made_when_they_are_needed_and_cut_as_those_of_json_lines(tmp_path):
    def turns(i, answer):
        said = [text for turn in range(i % 4) for text in (f"\n\nHuman: q {i} {turn}", "\n\nAssistant: so")]
        return f"{''.join(said)}\n\nHuman: why {i}\n\nAssistant: {answer}"

    pairs = [{"chosen": turns(i, "yes"), "rejected": turns(i, "no")} for i in range(16)]
    answered = [{"messages": turns(i, "yes")} for i in range(16)]
    count = lambda messages, answer: sum(len(message.content.split()) for message in messages)  # noqa: E731
    limits = {"count_tokens": count, "max_tokens": 6}
    for number, (rows, read) in enumerate((
        (pairs, lambda path: read_preferences(path, **limits)),
        (answered, lambda path: read_judgements(path, judged=False, **limits)),
    )):
        (tmp_path / str(number)).mkdir()
        records, report = read(table_files.write_parquet_folder(tmp_path / str(number) / "rows", rows, 9))
        expected, _ = read(table_files.write_jsonl(tmp_path / str(number) / "rows.jsonl", rows))
        assert isinstance(records, LazyRecords) and isinstance(expected, list) and len(report.cut) == 8
        assert list(records) == expected and list(records[3:9:2]) == expected[3:9:2] and records[-1] == expected[-1]
        parts, lists = split_by_prompt(records, 0.3, 5), split_by_prompt(expected, 0.3, 5)
        assert [list(part) for part in parts] == list(lists) and all(isinstance(part, LazyRecords) for part in parts)


@pytest.mark.process
def test_reading_json_lines_imports_no_library_of_tables(tmp_path):
    path = table_files.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Why?", "chosen": "A", "rejected": "B"}])
    program = (f"import sys; from jaxalign.data.sources.preferences import read_preferences; read_preferences({str(path)!r}); "
               "print({'pyarrow', 'datasets', 'tensorflow_datasets', 'tensorflow'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
