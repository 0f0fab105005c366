"""Data in the formats of tables, for tests: the same rows as Parquet, Arrow, a saved data set and a TFDS data set."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

Row = dict[str, Any]


def write_jsonl(path: pathlib.Path, rows: list[Row]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet_folder(folder: pathlib.Path, rows: list[Row], first: int) -> pathlib.Path:
    """Write two files, of which the first has `first` rows, in row groups of 7 rows."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    table = pa.Table.from_pylist(rows)
    for number, part in enumerate((table.slice(0, first), table.slice(first))):
        parquet.write_table(part, folder / f"train-{number:05d}.parquet", row_group_size=7)
    return folder


def write_arrow(path: pathlib.Path, rows: list[Row], stream: bool = False) -> pathlib.Path:
    """Write an Arrow file, or a stream as the library datasets does, in batches of 5 rows."""
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, 5)
    return path


def save_dataset(folder: pathlib.Path, rows: list[Row]) -> pathlib.Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), num_shards=2)
    return folder


def prepare_tfds(data_dir: pathlib.Path, name: str, rows: list[Row], kinds: dict[str, Any]) -> str:
    """Prepare a data set with TFDS itself, and return its name in `config.data`.

    Args:
      data_dir: the value of TFDS_DATA_DIR with which it is read.
      name: its name, in snake case.
      rows: its rows, whose order is kept.
      kinds: for each field, str, a NumPy type, "messages" or "texts".
    """
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    features = {
        "messages": tfds.features.Sequence({"role": text, "content": text}), "texts": tfds.features.Sequence(text), str: text,
    }

    def info(self):
        columns = {field: features.get(kind, kind) for field, kind in kinds.items()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(columns), disable_shuffling=True)

    def generate(self):
        return enumerate(rows)

    builder = type("".join(part.capitalize() for part in name.split("_")), (tfds.core.GeneratorBasedBuilder,), {
        "VERSION": tfds.core.Version("1.0.0"), "_info": info, "_generate_examples": generate, "__module__": __name__,
        "code_path": None,  # There is no folder of checksums; TFDS would look for it with a package that may be missing.
        "_split_generators": lambda self, manager: {"train": self._generate_examples()},
    }, skip_registration=True)
    tfds.disable_progress_bar()
    builder(data_dir=str(data_dir), file_format="array_record").download_and_prepare()
    return f"tfds:{name}"


def write_form(folder: pathlib.Path, form: str, rows: list[Row], name: str) -> Any:
    """Write rows as "jsonl", "folder" (Parquet), "saved" or "tfds", and return the path or name for `config.data`.

    All forms have the name `name`, so that the ids of prompts are equal.
    """
    folder.mkdir(exist_ok=True)
    if form == "jsonl":
        return write_jsonl(folder / f"{name}.jsonl", rows)
    if form == "folder":
        return write_parquet_folder(folder / name, rows, 11)
    if form == "saved":
        pytest.importorskip("datasets")
        return save_dataset(folder / name, rows)
    pytest.importorskip("tensorflow_datasets")
    return prepare_tfds(folder, name, rows, dict.fromkeys(rows[0], str))
