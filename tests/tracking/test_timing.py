"""Timing files: totals per phase over all starts of a stage."""

from __future__ import annotations

import pytest

from jaxalign.tracking.timing import Timeline, Timing, read_timing, rest_of


def _clock(*times):
    return iter(times).__next__


def _total(seconds, tokens, runs, flops=0.0, peak=0.0, since=0.0):
    return {"seconds": seconds, "tokens": tokens, "flops": flops, "peak": peak, "runs": runs, "since": since}


def test_totals_cover_every_start(tmp_path):
    path = tmp_path / "timing.jsonl"
    first = Timing(path, clock=_clock(10.0, 12.5, 20.0, 21.0))
    with first.phase("compile"):
        pass
    with first.phase("train", tokens=100):
        pass
    with Timing(path, clock=_clock(0.0, 0.25)).phase("train") as phase:
        phase.tokens = 40
    assert read_timing(path) == {
        "compile": _total(2.5, 0, 1), "train": _total(1.25, 140, 2)}


def test_phase_that_raises_is_still_counted(tmp_path):
    with pytest.raises(KeyboardInterrupt), Timing(tmp_path / "t.jsonl", clock=_clock(1.0, 3.0)).phase("train"):
        raise KeyboardInterrupt
    assert read_timing(tmp_path / "t.jsonl")["train"]["seconds"] == 2.0


def test_torn_row_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"phase": "train", "seconds": 1.0, "tokens": 5}\n{"phase": "tr')
    Timing(path).add("train", 2.0, tokens=7)
    assert read_timing(path) == {"train": _total(3.0, 12, 2)}


def test_missing_file_has_no_phases(tmp_path):
    assert read_timing(tmp_path / "timing.jsonl") == {}


def test_phases_of_steps_are_summed_and_the_rest_is_other(tmp_path):
    timeline, timing = Timeline(clock=_clock(0.0, 1.0, 1.0, 4.0, 5.0, 6.5)), Timing(tmp_path / "timing.jsonl", peak=8.0)
    for name, tokens, flops in (("generate", 10, 2.0), ("update", 30, 12.0), ("generate", 5, 1.0)):
        with timeline.phase(name) as phase:
            phase.tokens, phase.flops = tokens, flops
    timeline.write(timing, 7.0, "other", 99)
    timeline.write(timing, 2.0, "other", 99, 5.0)  # Nothing was timed since the last write.
    assert read_timing(timing.path) == {
        "generate": _total(2.5, 15, 1, 3.0, 8.0), "update": _total(3.0, 30, 1, 12.0, 8.0),
        "other": _total(3.5, 99, 2, 5.0, 8.0),
    }


def test_time_outside_all_phases_is_other(tmp_path):
    path = tmp_path / "timing.jsonl"
    Timing(path).add("train", 100.0)  # From an earlier start.
    with rest_of(path, clock=_clock(50.0, 59.0)):
        Timing(path).add("train", 2.0)
        Timing(path).add("first step", 1.5, since=4.0)
    assert read_timing(path) == {
        "train": _total(102.0, 0, 2), "first step": _total(1.5, 0, 1, since=4.0), "other": _total(5.5, 0, 1),
    }
    with rest_of(tmp_path / "nothing.jsonl", clock=_clock(0.0, 9.0)):
        pass
    assert read_timing(tmp_path / "nothing.jsonl") == {}
