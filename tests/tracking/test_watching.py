"""The state of a run from its files, also while they are half-written or damaged."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from jaxalign.tracking.watching.run import RunView
from jaxalign.tracking.watching.stage import Tail

NOW = 2_000_000_000.0


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def append(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def workdir(tmp_path):
    """A run in stage ppo, with 12 of 100 steps of 20 s, whose files have just been written."""
    write(tmp_path / "config.json", {"stages": ["sft", "ppo"], "ppo": {"iterations": 100},
                                     "tracking": {"system_seconds": 10}})
    write(tmp_path / "sft" / "manifest.json", {"status": "done"})
    write(tmp_path / "ppo" / "manifest.json", {"status": "running"})
    append(tmp_path / "ppo" / "metrics.jsonl", *({"step": n, "score": n / 2, "kl_k3": 0.5, "response_length": 30.0}
                                                 for n in range(12)))
    append(tmp_path / "ppo" / "timing.jsonl", {"phase": "first step", "seconds": 60.0, "tokens": 1000, "peak": 1e12},
           {"phase": "update", "seconds": 100.0, "tokens": 5000, "flops": 4e13, "peak": 1e12})
    for path in (tmp_path / "ppo").iterdir():
        os.utime(path, (NOW - 300, NOW - 300))
    append(tmp_path / "system.jsonl", *({"time": NOW - 240 + 10 * n, "stage": "ppo", "count": n // 2, "total": 100,
                                         "unit": "step", "tokens": 1000 * n, "process_memory": 2**30} for n in range(25)))
    return tmp_path


def status(workdir, now=NOW):
    return RunView(workdir, clock=lambda: now).status()


def test_a_running_stage_has_its_progress_rates_and_time_left(workdir):
    run = status(workdir)
    assert (run.state, run.stage, run.finished_stages, run.stages) == ("running", "ppo", 1, 2)
    assert (run.count, run.total, run.step_seconds, run.seconds_left) == (12, 100, 20.0, 88 * 20.0)
    assert run.tokens_per_second == pytest.approx(100.0)  # 1000 tokens in 10 s.
    assert run.utilisation == pytest.approx(0.4)  # 4e13 FLOPs in 100 s at a peak of 1e12; the first step does not count.
    assert (run.score, run.kl, run.length) == (pytest.approx(3.25), 0.5, 30.0)  # The score of the last ten rows: 1 to 5.5.


def test_a_finished_run_and_a_run_that_has_not_begun(workdir, tmp_path_factory):
    write(workdir / "ppo" / "manifest.json", {"status": "done"})
    assert status(workdir).state == "finished" and status(workdir).score == pytest.approx(3.25)
    fresh = tmp_path_factory.mktemp("fresh")
    write(fresh / "config.json", {"stages": ["sft"]})
    assert status(fresh).state == "waiting"


def test_a_process_that_writes_no_more_has_stopped_and_one_without_steps_has_stalled(workdir):
    assert status(workdir, NOW + 40).state == "running"
    gone = status(workdir, NOW + 100)
    assert gone.state == "stopped" and "100 s" in gone.note
    append(workdir / "system.jsonl", *({"time": NOW + 10 * n, "stage": "ppo", "count": 12, "total": 100} for n in range(1, 23)))
    hangs = status(workdir, NOW + 220)
    assert hangs.state == "stalled" and hangs.alerts[-1][1].name == "stall"


def test_the_end_of_a_run_is_read_until_it_is_resumed(workdir):
    append(workdir / "system.jsonl", {"time": NOW, "stage": "ppo", "event": "failed", "error": "the disk is full"})
    assert (status(workdir).state, status(workdir).note) == ("failed", "The run failed: the disk is full")
    append(workdir / "system.jsonl", *({"time": NOW + 900 + 10 * n, "stage": "ppo", "count": 10 + n, "total": 100, "tokens": n}
                                       for n in range(5)))
    resumed = status(workdir, NOW + 941)  # Rates are those since the last start.
    assert (resumed.state, resumed.count, resumed.step_seconds, resumed.seconds_left) == ("running", 14, 10.0, 860.0)


def test_a_run_that_failed_before_its_stage_wrote_anything_names_this_stage(workdir):
    shutil.rmtree(workdir / "ppo")
    append(workdir / "system.jsonl", {"time": NOW, "stage": "ppo", "event": "failed", "error": "too few rows"})
    run = status(workdir)
    assert (run.state, run.stage, run.count, run.total, run.finished_stages) == ("failed", "ppo", 0, 0, 1)


def test_a_run_without_system_metrics_is_judged_by_its_files(workdir):
    (workdir / "system.jsonl").unlink()
    assert status(workdir, NOW - 250).state == "running"
    assert status(workdir).state == "stopped"  # Five minutes without a change.
    assert (status(workdir).count, status(workdir).total) == (12, 100)


@pytest.mark.parametrize(("file", "content", "says"), [
    ("config.json", '{"stages": ["sf', "is not JSON"),
    ("config.json", "[]", "contains a list"),
    ("ppo/manifest.json", "", "is not JSON"),
    ("ppo/metrics.jsonl", '{"step": 0, "score": "high"}\n', "score is 'high'"),
    ("ppo/metrics.jsonl", "\x00\x00\n", "line 1 is not JSON"),
    ("system.jsonl", "no\n", "line 1 is not JSON"),
    ("ppo/timing.jsonl", '{"phase": "update", "seconds": "long"}\n', "has another form than expected"),
    ("config.json", '{"stages": 3}', "config.json is damaged: stages is '3'"),
    ("config.json", '{"stages": ["no_such_stage"]}', "no_such_stage"),
])
def test_a_damaged_file_is_a_sentence(workdir, file, content, says):
    write(workdir / file, content)
    run = status(workdir)
    assert run.state == "unreadable" and says in run.note and "\n" not in run.note


def test_a_directory_that_is_no_run_is_a_sentence(tmp_path):
    assert status(tmp_path / "none").note == f"The work directory {tmp_path / 'none'} is not a folder."
    assert "no config.json" in status(tmp_path).note


def test_a_half_written_line_is_read_once_it_is_whole_and_a_replaced_file_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 0}\n{"st')
    assert tail.read() == [{"step": 0}] and not tail.replaced
    with open(path, "a") as file:
        file.write('ep": 1}\n')
    assert tail.read() == [{"step": 1}] and tail.read() == []
    (tmp_path / "new").write_text('{"step": 0}\n')
    (tmp_path / "new").replace(path)
    assert tail.read() == [{"step": 0}] and tail.replaced


def test_a_resumed_stage_counts_the_steps_of_its_new_file(workdir):
    view = RunView(workdir, clock=lambda: NOW)
    assert view.status().score == pytest.approx(3.25)
    write(workdir / "new", '{"step": 0, "score": 8.0}\n')
    (workdir / "new").replace(workdir / "ppo" / "metrics.jsonl")
    assert view.status().score == 8.0
