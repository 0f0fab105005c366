"""Timing files: totals by phase over every start of a stage."""

from __future__ import annotations

import pytest

from jaxalign.tracking.timing import Timing, read_timing


def _clock(*times):
    return iter(times).__next__


def test_totals_are_over_every_start(tmp_path):
    path = tmp_path / "timing.jsonl"
    first = Timing(path, clock=_clock(10.0, 12.5, 20.0, 21.0))
    with first.phase("compile"):
        pass
    with first.phase("train", tokens=100):
        pass
    with Timing(path, clock=_clock(0.0, 0.25)).phase("train") as phase:
        phase.tokens = 40
    assert read_timing(path) == {
        "compile": {"seconds": 2.5, "tokens": 0, "runs": 1}, "train": {"seconds": 1.25, "tokens": 140, "runs": 2}}


def test_phase_that_raises_is_still_counted(tmp_path):
    with pytest.raises(KeyboardInterrupt), Timing(tmp_path / "t.jsonl", clock=_clock(1.0, 3.0)).phase("train"):
        raise KeyboardInterrupt
    assert read_timing(tmp_path / "t.jsonl")["train"]["seconds"] == 2.0


def test_torn_row_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"phase": "train", "seconds": 1.0, "tokens": 5}\n{"phase": "tr')
    Timing(path).add("train", 2.0, tokens=7)
    assert read_timing(path) == {"train": {"seconds": 3.0, "tokens": 12, "runs": 2}}


def test_missing_file_has_no_phases(tmp_path):
    assert read_timing(tmp_path / "timing.jsonl") == {}
