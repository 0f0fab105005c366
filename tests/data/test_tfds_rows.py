"""Rows of a data set that TFDS itself prepared, without TensorFlow."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxalign.data.sources.jsonl import JsonRow
from jaxalign.data.sources.rows import data_identity, data_stem, open_rows
from jaxalign.errors import UserError
from jaxalign.stages.shared.manifest import file_fingerprint
from tests import table_files

pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")

ROWS = [
    {"messages": [{"content": f"Über {i}?", "role": "user"}, {"content": f"{i}.", "role": "assistant"}], "note": f"n{i}",
     "score": i / 2, "good": i % 2 == 0, "tags": ["a", "b"][: i % 3]}
    for i in range(7)
]


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    kinds = {"messages": "messages", "note": str, "score": np.float32, "good": np.bool_, "tags": "texts"}
    return table_files.prepare_tfds(tmp_path, "small_rows", ROWS, kinds)


def test_rows_have_plain_values_and_places(name):
    rows = open_rows(name)
    assert list(rows) == [JsonRow(number, row) for number, row in enumerate(ROWS, start=1)]
    assert rows[5].value == ROWS[5] and rows.place(6) == "tfds:small_rows row 6"
    assert rows.columns == ("good", "messages", "note", "score", "tags")
    part = open_rows("tfds:small_rows:1.0.0:train[2:4]", ("turns=messages",))
    assert [row.value["turns"] for row in part] == [row["messages"] for row in ROWS[2:4]]
    assert data_stem(name) == data_stem(f"{name}:train") == "small_rows" and data_stem(f"{name}:test") == "small_rows:test"
    assert "tensorflow" not in sys.modules


def test_an_unknown_class_label_is_an_empty_cell(tmp_path, monkeypatch):
    """TFDS stores -1 for an example without a label, such as those of a test split."""
    import tensorflow_datasets as tfds

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    rows = [{"note": "a", "kind": 0}, {"note": "b", "kind": 1}, {"note": "c", "kind": -1}]
    kinds = {"note": str, "kind": tfds.features.ClassLabel(names=["bad", "good"])}
    name = table_files.prepare_tfds(tmp_path, "kinds", rows, kinds)
    assert [row.value.get("kind") for row in open_rows(name)] == ["bad", "good", None]


def test_the_identity_is_the_version_and_the_prepared_files(name, tmp_path):
    identity, files = data_identity(name)
    assert identity == "tfds:small_rows/1.0.0:train" and {file.parent for file in files} == {tmp_path / "small_rows" / "1.0.0"}
    before = file_fingerprint(name, "data.train")
    assert file_fingerprint(f"{name}:train[:3]", "data.train") != before
    records = next(file for file in files if "array_record" in file.name)
    records.write_bytes(records.read_bytes() + b"x")
    assert file_fingerprint(name, "data.train") != before


def test_names_that_cannot_be_read_are_refused_with_the_command_that_prepares_them(name, monkeypatch):
    for path, message in (
        (f"{name}:test", r"no split 'test'; the splits are train"),
        ("tfds:no_such_rows", r"run: python -c \"import tensorflow_datasets as tfds; tfds.builder\('no_such_rows', file_format="
                              r"'array_record'\).download_and_prepare\(\)\""),
        ("tfds:", "is not a TFDS name"), (f"{name}:a:b", "is not a TFDS name"),
    ):
        with pytest.raises(UserError, match=message):
            open_rows(path)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"needs tensorflow-datasets; install it with pip install 'jaxalign\[tfds\]'"):
        open_rows(name)


def test_a_damaged_record_file_is_refused(name):
    records = next(file for file in data_identity(name)[1] if "array_record" in file.name)
    records.write_bytes(records.read_bytes()[:100])
    with pytest.raises(UserError, match=r"tfds:small_rows cannot be read \(.*\); prepare the data set again"):
        list(open_rows(name))
