"""The state of a run, from the files of its work directory."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import rounds
from jaxalign.errors import UserError
from jaxalign.tracking.alerts import KL, LENGTH, SCORE, Alert, stall_limit, stalled
from jaxalign.tracking.system import FAILED, FILE, INTERRUPTED
from jaxalign.tracking.watching.stage import StageView, Tail
from jaxalign.tracking.workdir import read_config, read_object

FINISHED, RUNNING, STALLED, STOPPED, UNKNOWN, UNREADABLE = "finished", "running", "stalled", "stopped", "waiting", "unreadable"
STATES = (FINISHED, RUNNING, STALLED, STOPPED, FAILED, INTERRUPTED, UNKNOWN, UNREADABLE)
"""The states of a run. A stalled process is alive but has not finished a step for a long time; a stopped one is not alive, as
far as its files show; a waiting run has not begun a stage."""

_BEATS = 3  # Intervals without a row of system.jsonl after which the process counts as gone.
_LATE_SECONDS = 15.0
_SAME_SECONDS = 2.0  # The last row and the last file that a process writes may be so far apart.
_RECENT = 40  # Rows of system.jsonl from which rates are computed.


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """A run at one moment. Numbers are None if they are unknown.

    Attributes:
      name: the name of the work directory.
      path: the work directory.
      state: one of `STATES`.
      note: a sentence about a run that is unreadable, failed or stopped; else "".
      stage: the label of the stage that runs or ran last; "" before the first.
      finished_stages, stages: the number of finished and of planned stages.
      count, total, unit: the progress of the stage, such as 12 of 200 steps; total is 0 if it is unknown.
      seconds_left: the estimated time to the end of the stage.
      step_seconds: the median time of a step.
      idle: seconds since the last change of the files.
      tokens_per_second: the rate of the stage.
      utilisation: needed FLOPs as a share of the peak of the devices.
      loss, score, kl, length: means over the last rows of the stage; of a finished run, of its last training stage.
      system: the last row of system.jsonl.
      alerts: (label of the stage, alert).
    """

    name: str
    path: Path
    state: str
    note: str = ""
    stage: str = ""
    finished_stages: int = 0
    stages: int = 0
    count: int = 0
    total: int = 0
    unit: str = "step"
    seconds_left: float | None = None
    step_seconds: float | None = None
    idle: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None
    loss: float | None = None
    score: float | None = None
    kl: float | None = None
    length: float | None = None
    system: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alerts: tuple[tuple[str, Alert], ...] = ()


class RunView:
    """A work directory that is read again and again. Appended files are read once.

    Args:
      workdir: the work directory; it need not exist.
      clock: the time of day in seconds since 1970; for tests.
    """

    def __init__(self, workdir: str | Path, clock=time.time):
        self.path, self._clock = Path(workdir), clock
        self._system = Tail(self.path / FILE)
        self._beats: collections.deque[dict[str, Any]] = collections.deque(maxlen=_RECENT)
        self._stages: dict[str, StageView] = {}

    def status(self) -> RunStatus:
        """The state now. A missing, half-written or damaged file becomes a sentence in `note`."""
        name = self.path.resolve().name
        try:
            return self._read(name)
        except UserError as error:
            return RunStatus(name, self.path, UNREADABLE, str(error))
        except OSError as error:
            return RunStatus(name, self.path, UNREADABLE, f"{error.filename or self.path} cannot be read ({error.strerror}).")
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            sentence = f"A file of {self.path} has another form than expected ({type(error).__name__}: {error})."
            return RunStatus(name, self.path, UNREADABLE, sentence)

    def _read(self, name: str) -> RunStatus:
        if not self.path.is_dir():
            return RunStatus(name, self.path, UNREADABLE, f"The work directory {self.path} is not a folder.")
        config = read_config(self.path)
        if not config:
            return RunStatus(name, self.path, UNREADABLE, f"{self.path} has no config.json, so no run has started in it.")
        folders = planned_folders(config)
        done = [read_object(self.path / folder / "manifest.json").get("status") for folder in folders]
        self._beats.extend(self._system.read())
        started = [folder for folder, status in zip(folders, done, strict=True) if status is not None]
        views = {folder: self._stages.setdefault(folder, StageView(self.path / folder)) for folder in started}
        for view in views.values():
            view.read()
        base = RunStatus(
            name, self.path, UNKNOWN, finished_stages=done.count("done"), stages=len(folders),
            system=next((row for row in reversed(self._beats) if "process_memory" in row), {}),
            alerts=tuple((rounds.label(folder), alert) for folder, view in views.items() for alert in view.alerts),
        )
        if not started:
            return self._ended(base, 0.0) or base
        if all(status == "done" for status in done):
            return _with_metrics(dataclasses.replace(base, state=FINISHED), list(views.values()))
        return self._running(dataclasses.replace(base, stage=rounds.label(started[-1])), views[started[-1]], config)

    def _running(self, base: RunStatus, view: StageView, config: Mapping[str, Any]) -> RunStatus:
        """The state of a run with an unfinished stage."""
        now = self._clock()
        beats = _since_start(self._beats, base.stage)
        last, (step_seconds, moved) = beats[-1] if beats else {}, step_times(beats)
        changed = max([time for time in (view.changed(), last.get("time")) if time is not None], default=now)
        unit, total = last.get("unit", "step"), last.get("total")
        if not total:  # The section of the config may state it.
            section = config.get(rounds.parse(view.folder.name)[0]) or {}
            total = next((section[name] for name in ("iterations", "steps") if isinstance(section.get(name), int)), 0)
        count = max(last.get("count", 0), view.steps if unit == "step" else 0)
        status = _with_metrics(dataclasses.replace(
            base, count=count, total=total, unit=unit, step_seconds=step_seconds, idle=max(0.0, now - changed),
            seconds_left=max(0, total - count) / speed if (speed := _rate(beats, "count")) and total else None,
            tokens_per_second=_rate(beats, "tokens") or view.tokens_per_second, utilisation=view.utilisation,
        ), [view])
        ended = self._ended(status, changed)
        if ended is not None:
            return ended
        interval = (config.get("tracking") or {}).get("system_seconds") or 0.0
        if beats and interval:
            if now - last["time"] > _BEATS * interval + _LATE_SECONDS:
                note = f"The process has written nothing for {status.idle:,.0f} s: it was killed, or its machine is down."
                return dataclasses.replace(status, state=STOPPED, note=note)
            alert = stalled(now - moved, step_seconds)
            if alert is not None:
                return dataclasses.replace(status, state=STALLED, alerts=(*status.alerts, (status.stage, alert)))
        elif status.idle > stall_limit(step_seconds):
            note = f"No file has changed for {status.idle:,.0f} s: the process has ended or hangs."
            return dataclasses.replace(status, state=STOPPED, note=note)
        return dataclasses.replace(status, state=RUNNING)

    def _ended(self, status: RunStatus, changed: float) -> RunStatus | None:
        """The state of a run whose last row of system.jsonl says that it failed or was interrupted; None if it has since been
        resumed. changed: when another file last changed."""
        row = self._beats[-1] if self._beats else {}
        if row.get("event") not in (FAILED, INTERRUPTED) or row["time"] < changed - _SAME_SECONDS:
            return None
        notes = {FAILED: f"The run failed: {row.get('error') or 'its log has the reason'}",
                 INTERRUPTED: "The run was interrupted; the same command resumes it."}
        if row.get("stage", status.stage) != status.stage:  # It ended in a stage without files, so no progress is shown.
            status = RunStatus(status.name, status.path, status.state, status.note, row["stage"], status.finished_stages,
                               status.stages, idle=status.idle, system=status.system, alerts=status.alerts)
        return dataclasses.replace(status, state=row["event"], note=notes[row["event"]])


def _with_metrics(status: RunStatus, views: list[StageView]) -> RunStatus:
    """Adds the metrics of the last stage that has some."""
    view = next((view for view in reversed(views) if view.rows), None)
    if view is None:
        return status
    values = {"loss": view.mean(("loss", "policy_loss")), "score": view.mean(SCORE), "kl": view.mean(KL),
              "length": view.mean(LENGTH)}
    return dataclasses.replace(status, **values)


def _since_start(rows: Iterable[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    """The rows of system.jsonl of a stage since its last start, after which the counts begin again."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        again = "event" in row or row.get("stage") != stage
        restarted = kept and any(row.get(name, 0) < kept[-1].get(name, 0) for name in ("count", "tokens") if name in row)
        if again or restarted:
            kept = []
        kept += [] if again else [row]
    return kept


def step_times(beats: list[dict[str, Any]]) -> tuple[float | None, float]:
    """(the median time of a step, when a step last ended or the stage began) from rows of system.jsonl."""
    ends = [beats[0]] if beats and "count" in beats[0] else []
    for row in beats:
        if "count" in row and (not ends or row["count"] != ends[-1]["count"]):
            ends.append(row)
    spent = [(after["time"] - before["time"]) / (after["count"] - before["count"])
             for before, after in zip(ends, ends[1:], strict=False) if after["count"] > before["count"]]
    moved = (ends or beats or [{"time": 0.0}])[-1 if ends else 0]["time"]
    return (statistics.median(spent) if spent else None), moved


def _rate(beats: list[dict[str, Any]], name: str) -> float | None:
    """The increase of a count per second over rows of system.jsonl; None if it does not increase."""
    counted = [row for row in beats if name in row]
    grown = counted[-1][name] - counted[0][name] if counted else 0
    return grown / (counted[-1]["time"] - counted[0]["time"]) if grown > 0 else None


def planned_folders(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The folders of the stages of a run in the order in which they run, by its config.json.

    Raises:
      UserError: the config names a stage that cannot be found.
    """
    reward = types.SimpleNamespace(source=(config.get("reward") or {}).get("source") or "preference")
    number = config.get("rounds") or 1
    return rounds.folders(types.SimpleNamespace(stages=config.get("stages") or (), rounds=number, reward=reward))
