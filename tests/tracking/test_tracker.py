"""Trackers receive every step once despite kills and resumes, and their failures never reach the training loop."""

from __future__ import annotations

import logging

import pytest

from jaxalign.errors import UserError
from jaxalign.registry.trackers import TRACKERS, TrackerRecord, tracker_record
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.tracker import Tracker, Trackers, make_trackers


class Keeps:
    """Records its calls; raises in the methods, and at the steps, named in `fails`."""

    def __init__(self, *fails):
        self.fails, self.config, self.steps, self.status = fails, None, [], None

    def start(self, config):
        self.config = config
        self._fail("start")

    def log(self, step, metrics):
        self._fail(step)
        self.steps.append((step, metrics["loss"]))

    def finish(self, status):
        self._fail("finish")
        self.status = status

    def _fail(self, what):
        if what in self.fails:
            raise ConnectionError("no network")


def train(directory, tracker, first, last, raises=None):
    with Trackers("sft", directory, {"keeps": tracker}, {"seed": 3}, first) as trackers:
        for step in range(first, last):
            trackers.log(step, {"loss": step / 2})
        if raises:
            raise raises


def test_a_tracker_receives_config_steps_and_status(tmp_path):
    tracker = Keeps()
    assert isinstance(tracker, Tracker)
    train(tmp_path, tracker, 0, 3)
    assert tracker.config == {"seed": 3, "stage": "sft", "directory": str(tmp_path), "step": 0}
    assert tracker.steps == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert tracker.status == "done"


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_the_status_is_how_the_loop_ended(tmp_path, error, status):
    tracker = Keeps()
    with pytest.raises(error):
        train(tmp_path, tracker, 0, 1, error)
    assert tracker.status == status


def test_every_step_arrives_once_despite_two_resumes(tmp_path):
    """Killed at step 5, resumed from a checkpoint at step 2 and killed at step 3, then resumed once more."""
    steps = []
    for first, last in ((0, 5), (2, 3), (2, 8)):
        tracker = Keeps()
        train(tmp_path, tracker, first, last)
        steps += [step for step, _ in tracker.steps]
    assert steps == list(range(8))


def test_a_tracker_that_failed_or_was_added_later_gets_the_missing_steps_at_the_next_start(tmp_path):
    train(tmp_path, Keeps(2), 0, 4)
    tracker = Keeps()
    train(tmp_path, tracker, 4, 6)
    assert tracker.steps == [(step, step / 2) for step in range(2, 6)]
    later = Keeps()
    with Trackers("sft", tmp_path, {"keeps": tracker, "later": later}, {}, 6) as trackers:
        trackers.log(6, {"loss": 3.0})
    assert later.steps == [(step, step / 2) for step in range(7)]


@pytest.mark.parametrize("fails", ["start", 1, "finish"])
def test_a_failure_is_reported_once_and_stops_nothing(tmp_path, caplog, fails):
    failing, other = Keeps(fails), Keeps()
    with caplog.at_level(logging.WARNING, "jaxalign"):
        with Trackers("sft", tmp_path, {"failing": failing, "other": other}) as trackers:
            for step in range(3):
                trackers.log(step, {"loss": 1.0})
    assert len(caplog.messages) == 1
    assert "tracker 'failing' failed in" in caplog.text and "ConnectionError: no network" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(other.steps) == 3


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = Keeps()
    train(None, tracker, 0, 2)
    assert len(tracker.steps) == 2 and not list(tmp_path.iterdir())


def test_trackers_passed_as_objects_are_named_by_their_classes(tmp_path):
    first, second = Keeps(), Keeps()
    with Trackers("sft", tmp_path, (first, second)) as trackers:
        trackers.log(0, {"loss": 1.0})
    assert first.steps == second.steps == [(0, 1.0)]
    assert (tmp_path / "trackers.json").read_text() == '{"Keeps": 1, "Keeps 2": 1}'


def test_a_registered_tracker_is_created_by_name():
    TRACKERS.register(TrackerRecord("keeps", Keeps))
    try:
        (made,) = make_trackers(("keeps",)).values()
        assert isinstance(made, Keeps)
    finally:
        TRACKERS.unregister("keeps")


def test_a_factory_that_raises_or_returns_something_else_is_skipped(tmp_path, caplog):
    path = tmp_path / "own.py"
    path.write_text("def broken():\n    raise OSError('no login')\n\ndef number():\n    return 3\n")
    assert make_trackers((f"{path}:broken", f"{path}:number")) == {}
    assert "OSError: no login" in caplog.text and "its constructor returned an object of type int" in caplog.text


@pytest.mark.parametrize(("name", "message"), [
    ("wandbb", "config.tracking.trackers is 'wandbb'; one of .*did you mean wandb"),
    ("no.such.module:name", "no.such.module cannot be imported"),
    ("math:missing", "math has no missing"),
    ("math:pi", "names 'math:pi', which is not a tracker"),
    ("collections:OrderedDict", "a class with the methods start"),
])
def test_a_name_that_is_not_a_tracker_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        tracker_record(name, "config.tracking.trackers")
