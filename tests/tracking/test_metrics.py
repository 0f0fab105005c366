"""Metric files: exact floats, atomic truncation, torn lines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.tracking.metrics import MetricFiles, by_name, read_metrics, to_metrics


@contextlib.contextmanager
def started(directory, step=10**9):
    """Yield the metric files of `directory` for a run that starts at step `step`, and close them at the end."""
    files = MetricFiles(directory)
    files.start({"step": step})
    yield files
    files.finish()


def _write(directory, steps, first=10**9):
    with started(directory, first) as files:
        for step in steps:
            files.log(step, {"loss": step / 3})
    return directory / "metrics.jsonl"


@settings(deadline=None)  # A busy disk can be slow to sync.
@given(value=st.floats(allow_nan=False))
def test_floats_read_back_exactly(tmp_path_factory, value):
    directory = tmp_path_factory.mktemp("metrics")
    with started(directory) as files:
        files.log(0, {"x": value})
    assert read_metrics(directory / "metrics.jsonl") == [{"step": 0, "x": value}]


def test_scalars_of_every_kind_become_plain_numbers(tmp_path):
    with started(tmp_path) as files:
        files.log(np.int64(3), {"count": np.int32(7), "half": jnp.bfloat16(0.5), "third": np.float32(1 / 3)})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 3, "count": 7, "half": 0.5, "third": 0.3333333432674408}  # the float32 nearest to 1/3
    assert type(row["count"]) is int


def test_non_finite_numbers_are_written_as_text_and_read_as_float(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with started(tmp_path) as files:
        files.log(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert path.read_text() == '{"step": 0, "a": "nan", "b": "inf", "c": "-inf"}\n'
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_rows_before_the_first_step_are_kept(tmp_path):
    _write(tmp_path, [0, 1])
    path = _write(tmp_path, [2], first=2)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_killed_and_resumed_run_has_the_bytes_of_an_uninterrupted_one(tmp_path):
    whole, resumed = _write(tmp_path / "whole", range(10)), _write(tmp_path / "resumed", range(7))
    with open(resumed, "a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    _write(tmp_path / "resumed", range(4, 10), first=4)  # the last checkpoint was at step 4
    assert resumed.read_bytes() == whole.read_bytes()


def test_torn_line_is_dropped_when_the_file_is_opened_and_ignored_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert read_metrics(path) == [{"step": 0}]
    _write(tmp_path, [1], first=1)
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_start_at_step_0_empties_the_file(tmp_path):
    path = _write(tmp_path, range(3))
    _write(tmp_path, [], first=0)
    assert path.read_bytes() == b""


def test_row_is_visible_to_others_before_flush(tmp_path):
    files = MetricFiles(tmp_path / "deep")
    files.start({})
    files.log(0, {"loss": 1.5})
    assert read_metrics(files.path) == [{"step": 0, "loss": 1.5}]
    files.finish()
    files.finish()


def test_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["not json", "[1, 2]", "\ufffd"])
def test_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 "):
        read_metrics(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    norm: float
    absent: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    tokens: int
    inner: Inner
    parts: dict[str, float]


def test_a_record_is_flattened_in_alphabetical_order_without_what_is_none():
    found = by_name(Outer(tokens=3, inner=Inner(norm=0.5), parts={"score_b": 1.0, "score_a": 2.0}))
    assert list(found.items()) == [("norm", 0.5), ("score_a", 2.0), ("score_b", 1.0), ("tokens", 3)]
    assert list(by_name({"b": 1, "a": 2})) == ["a", "b"]


def test_a_name_that_two_fields_report_is_refused():
    with pytest.raises(ValueError, match="norm"):
        by_name(Outer(tokens=3, inner=Inner(norm=0.5), parts={"norm": 1.0}))


@pytest.mark.parametrize(("values", "error"), [
    ({"step": 1.0}, ValueError), ({"loss": "low"}, TypeError), ({"loss": np.zeros(2)}, ValueError)])
def test_a_value_that_is_not_a_scalar_is_refused(tmp_path, values, error):
    with pytest.raises(error):
        to_metrics(values)
    with started(tmp_path) as files, pytest.raises(error):
        files.log(0, values)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
