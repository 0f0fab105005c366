"""Metric files: exact floats, atomic truncation, torn lines."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.tracking.metrics import MetricWriter, read_metrics


def _write(path, steps):
    with MetricWriter(path) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 3})


@given(value=st.floats(allow_nan=False))
def test_floats_read_back_exactly(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricWriter(path) as writer:
        writer.write(0, {"x": value})
    assert read_metrics(path) == [{"step": 0, "x": value}]


def test_scalars_of_every_kind_become_plain_numbers(tmp_path):
    with MetricWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(np.int64(3), {"count": np.int32(7), "half": jnp.bfloat16(0.5), "third": np.float32(1 / 3)})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 3, "count": 7, "half": 0.5, "third": 0.3333333432674408}  # the float32 nearest to 1/3
    assert type(row["count"]) is int


def test_what_json_lacks_is_written_as_text_and_read_as_float(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricWriter(path) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert path.read_text() == '{"step": 0, "a": "nan", "b": "inf", "c": "-inf"}\n'
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_rows_keep_appending_without_truncate(tmp_path):
    _write(tmp_path / "metrics.jsonl", [0, 1])
    _write(tmp_path / "metrics.jsonl", [2])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_killed_and_resumed_run_has_the_bytes_of_an_untouched_one(tmp_path):
    _write(tmp_path / "whole.jsonl", range(10))
    _write(tmp_path / "resumed.jsonl", range(7))
    with open(tmp_path / "resumed.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    with MetricWriter(tmp_path / "resumed.jsonl") as writer:  # the last checkpoint was at step 4
        writer.truncate(4)
        for step in range(4, 10):
            writer.write(step, {"loss": step / 3})
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_torn_line_is_dropped_when_the_file_is_opened_and_ignored_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert read_metrics(path) == [{"step": 0}]
    _write(path, [1])
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_truncate_at_the_start_empties_the_file(tmp_path):
    _write(tmp_path / "metrics.jsonl", range(3))
    with MetricWriter(tmp_path / "metrics.jsonl") as writer:
        writer.truncate(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_row_is_visible_to_others_before_flush(tmp_path):
    writer = MetricWriter(tmp_path / "deep" / "metrics.jsonl")
    writer.write(0, {"loss": 1.5})
    assert read_metrics(writer.path) == [{"step": 0, "loss": 1.5}]
    writer.close()
    writer.close()


def test_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["not json", "[1, 2]", "\ufffd"])
def test_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 "):
        read_metrics(path)


@pytest.mark.parametrize(("values", "error"), [
    ({"step": 1.0}, ValueError), ({"loss": "low"}, TypeError), ({"loss": np.zeros(2)}, ValueError)])
def test_what_is_not_a_scalar_is_refused(tmp_path, values, error):
    with MetricWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(error):
        writer.write(0, values)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
