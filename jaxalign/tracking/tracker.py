"""Trackers receive the metrics of training. The metric files are one; `config.tracking.trackers` adds others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from jaxalign.json_text import parse_json
from jaxalign.parallel import hosts
from jaxalign.registry.trackers import tracker_record
from jaxalign.tracking.alerts import Alerts
from jaxalign.tracking.metrics import MetricFiles, Metrics, read_metrics, to_metrics
from jaxalign.tracking.sinks.base import reason
from jaxalign.tracking.webhook import announce

_LOG = logging.getLogger("jaxalign")
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
"""The statuses passed to `Tracker.finish`."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of one training loop. Its methods are called only in process 0, from the training thread.

    A tracker may also have the method `next_step() -> int`, called after `start`: the first step that its service does not
    have. Without it, the next step is the one that trackers.json records, which can be wrong by the steps that the service
    buffered or received when the process was killed.
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Called once, before the first step.

        Args:
          config: the settings of the run as plain JSON values, plus "stage" (the name of the loop, such as "sft"), "directory"
            (its folder as a string, or None), "step" (the first step that this process computes) and, in a stage, "workdir".
        """

    def log(self, step: int, metrics: Metrics) -> None:
        """Called once per step, in ascending order; `step` counts from 0."""

    def finish(self, status: str) -> None:
        """Called once, with "done", "failed" or "interrupted", after the last call of `log`."""


def make_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """One tracker for each name in `config.tracking.trackers`, by name. Only the first process gets trackers.

    A warning is logged and the tracker omitted if its constructor fails or returns a different object.

    Raises:
      UserError: a name is not registered, or its object cannot be imported.
    """
    trackers = {}
    for name in names if hosts.is_first() else ():
        make = tracker_record(name, "config.tracking.trackers").load()
        try:
            tracker = make()
        except Exception as error:  # The user's code may raise anything.
            _warn(name, "its constructor", error)
            continue
        if isinstance(tracker, Tracker):
            trackers[name] = tracker
        else:
            _LOG.warning(f"tracker {name!r} is ignored: its constructor returned an object of type {type(tracker).__name__}; "
                         "one with methods start(config), log(step, metrics) and finish(status) is expected")
    return trackers


class Trackers:
    """The metric files and all trackers of one training loop. A tracker that fails never stops training.

    As a context manager it starts the trackers on entry and finishes them on exit. Each tracker receives every step once, even
    if the run is killed and resumed: a tracker with the method `next_step` says which step is its next one, and
    DIRECTORY/trackers.json stores that of each other tracker. A resumed run recomputes the steps since its last checkpoint,
    with equal results, and logs only the steps that a tracker has not received. Steps that a tracker missed, because it failed
    or was added later, are read from the metric file. Without a directory nothing is stored.

    A tracker that raises is reported once and receives nothing more from this process. An error of the metric files is
    raised, because a run without metrics has failed.

    Args:
      stage: the name of the loop.
      directory: its folder, or None for a loop without files.
      trackers: trackers by name, or a sequence of trackers, which are named after their classes.
      config: the run's settings, as plain values.
      step: the first step that this process computes.
    """

    def __init__(self, stage: str, directory: Path | None = None, trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
                 config: Mapping[str, Any] | None = None, step: int = 0):
        self._files = None if directory is None else MetricFiles(directory)
        self._trackers: dict[str, Tracker] = {}
        if hosts.is_first() and isinstance(trackers, Mapping):
            self._trackers.update(trackers)
        elif hosts.is_first():
            for tracker in trackers:
                name = type(tracker).__name__
                self._trackers[name if name not in self._trackers else f"{name} {len(self._trackers) + 1}"] = tracker
        self._next_steps: dict[str, int] = {}
        self._steps_file = None if directory is None or not self._trackers else directory / "trackers.json"
        if self._steps_file is not None and self._steps_file.exists():
            with contextlib.suppress(ValueError):  # A machine crash can empty the file; then all steps are logged again.
                recorded = parse_json(self._steps_file.read_text(encoding="utf-8"))
                if isinstance(recorded, dict) and all(type(step) is int for step in recorded.values()):
                    self._next_steps = recorded
        place = None if directory is None else str(directory)
        self._config = {**(config or {}), "stage": stage, "directory": place, "step": step}
        self._failed: set[str] = set()
        self._asked: set[str] = set()  # The trackers that know their next step.
        self._alerts = None if directory is None or not hosts.is_first() else Alerts()

    def __enter__(self) -> Self:
        if self._files is not None:
            self._files.start(self._config)
        rows = read_metrics(self._files.path) if self._files is not None and hosts.is_first() else []
        if self._alerts is not None:
            for row in rows:  # Alerts of earlier processes are not announced again.
                self._alerts.update(row)
        for name, tracker in self._trackers.items():
            self._call(name, "start", lambda tracker=tracker: tracker.start(dict(self._config)))
            self._ask(name, tracker)
            for row in rows:
                self._pass_on(name, row["step"], {key: value for key, value in row.items() if key != "step"})
        return self

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one step's scalars to all trackers. Raises TypeError or ValueError like `to_metrics`."""
        values = to_metrics(metrics)
        if self._files is not None:
            self._files.log(step, values)
        for alert in self._alerts.update({"step": step, **values}) if self._alerts is not None else ():
            announce(self._config["stage"], alert)
        for name in self._trackers:
            self._pass_on(name, step, values)

    def flush(self) -> None:
        """Forces the metric file to disk."""
        if self._files is not None:
            self._files.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        status = DONE if kind is None else FAILED if failed else INTERRUPTED
        for name, tracker in self._trackers.items():
            self._call(name, "finish", lambda tracker=tracker: tracker.finish(status))
        if self._files is not None:
            self._files.finish(status)

    def _ask(self, name: str, tracker: Tracker) -> None:
        """Takes the next step from a tracker that knows it."""
        if not callable(getattr(tracker, "next_step", None)):
            return
        self._asked.add(name)

        def ask() -> None:
            self._next_steps[name] = int(tracker.next_step())

        self._call(name, "next_step", ask)

    def _pass_on(self, name: str, step: int, values: Metrics) -> None:
        """Logs a step to a tracker that has not received it, and stores the tracker's next step."""
        if step < self._next_steps.get(name, 0):
            return
        if not self._call(name, "log", lambda: self._trackers[name].log(step, dict(values))):
            return
        self._next_steps[name] = step + 1
        if self._steps_file is not None and name not in self._asked:
            # Atomic, but without fsync, which would take milliseconds per step.
            temporary = self._steps_file.with_name(f".{self._steps_file.name}.tmp")
            stored = {name: step for name, step in self._next_steps.items() if name not in self._asked}
            temporary.write_text(json.dumps(stored), encoding="utf-8")
            os.replace(temporary, self._steps_file)

    def _call(self, name: str, method: str, action: Callable[[], None]) -> bool:
        """Calls a tracker's method. Returns whether it succeeded; also False for a tracker that failed before."""
        if name in self._failed:
            return False
        try:
            action()
        except Exception as error:  # The user's tracker may raise anything.
            self._failed.add(name)
            _warn(name, method, error)
            return False
        return True


def _warn(name: str, method: str, error: Exception) -> None:
    """Logs a failure, without the secrets that the message of a service may repeat."""
    _LOG.warning(f"tracker {name!r} failed in {method} ({reason(error)}); it receives nothing more from this process, and "
                 "training continues")
