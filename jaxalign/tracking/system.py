"""The state of the machine and of the running stage every few seconds, in `WORKDIR/system.jsonl`.

The file has clock times and values of the machine, so that metrics.jsonl need not. It is no output of a stage: no stage reads
it, and results do not depend on it. A run appends a row per interval, and a row with "event" when it ends. Only process 0
writes; its rows describe its host and its devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from jaxalign.errors import UserError
from jaxalign.tracking import jsonl, progress

FILE = "system.jsonl"
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"
"""The values of "event", in the last row of a run."""


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """The end of a run that did not finish.

    Attributes:
      event: FAILED or INTERRUPTED.
      stage: the label of the stage, which may be empty.
      reason: a sentence; it may be empty.
    """

    event: str
    stage: str
    reason: str


def read_end(workdir: Path) -> RunEnd | None:
    """The end of a run that did not finish; None if the last row of `system.jsonl` is damaged or records no such end."""
    last = next((line for line in reversed(jsonl.read_lines(workdir / FILE)) if line.strip()), "{}")
    row: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        row = jsonl.parse_row(last, workdir / FILE, 1)
    if row.get("event") not in (FAILED, INTERRUPTED):
        return None
    return RunEnd(row["event"], str(row.get("stage") or ""), str(row.get("error") or ""))


class SystemLog:
    """Writes the rows of one run.

    Attributes:
      stage: the label of the running stage, such as "ppo" or "ppo, round 2".

    Args:
      workdir: the work directory.
      clock: for tests; by default the time of day in seconds since 1970.
    """

    def __init__(self, workdir: Path, clock: Callable[[], float] = time.time):
        self.path, self.stage = workdir / FILE, ""
        self._clock, self._wrote = clock, False
        self._process: psutil.Process | None = None
        self._lock, self._ended = threading.Lock(), False

    def begin(self, stage: str) -> None:
        """Names the first stage. Appends a row if the file says that the run failed or was interrupted: it is resumed now."""
        self.stage = stage
        with contextlib.suppress(OSError):
            if read_end(self.path.parent) is not None:
                self.write()

    def write(self) -> dict[str, Any]:
        """Appends a row, and returns it."""
        row = {"time": round(self._clock(), 3), "stage": self.stage} | _progress() | self._host() | device_memory()
        self._append(row)
        return row

    def end(self, event: str, error: str = "") -> None:
        """Appends the last row, once. The row of a run that finished before its first interval ended is left out, as is one
        that cannot be written: it must not replace the error that ends the run."""
        if event != FINISHED or self._wrote:
            row = {"time": round(self._clock(), 3), "stage": self.stage, "event": event}
            with contextlib.suppress(OSError):
                self._append(row | ({"error": error} if error else {}), last=True)

    def _append(self, row: dict[str, Any], last: bool = False) -> None:
        with self._lock:  # Two threads write: that of the interval, and one that ends the run.
            if not self._ended and self.path.parent.is_dir():  # A moved run ends with a sentence about that.
                with jsonl.open_append(self.path) as file:
                    file.write(json.dumps(row) + "\n")
                self._wrote, self._ended = True, last

    def _host(self) -> dict[str, Any]:
        memory, load = psutil.virtual_memory(), {}
        if self._process is None:  # The first calls only begin to measure the load.
            self._process = psutil.Process()
            self._process.cpu_percent()
            psutil.cpu_percent()
        else:
            load = {"cpu": round(psutil.cpu_percent() / 100, 4),
                    "process_cpu": round(self._process.cpu_percent() / 100 / (os.cpu_count() or 1), 4)}
        return load | {
            "process_memory": self._process.memory_info().rss,
            "host_memory": memory.total - memory.available,
            "host_memory_total": memory.total,
            "disk_free": shutil.disk_usage(self.path.parent).free,
        }


def _progress() -> dict[str, Any]:
    """The counts of the progress bar; empty between two bars."""
    shown = progress.current()
    if shown is None:
        return {}
    return {"count": shown.count, "total": shown.total, "unit": shown.unit, "tokens": shown.tokens}


def device_memory() -> dict[str, int]:
    """The memory of the fullest device of this process, in bytes; empty on a CPU and before JAX has been used."""
    jax = sys.modules.get("jax")
    if jax is None or progress.current() is None:  # A stage that shows its progress has initialised the devices.
        return {}
    every = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if not every:
        return {}
    fullest = max(every, key=lambda stats: stats.get("bytes_in_use", 0))
    names = {"device_memory": "bytes_in_use", "device_memory_peak": "peak_bytes_in_use", "device_memory_total": "bytes_limit"}
    return {name: fullest[key] for name, key in names.items() if key in fullest}
