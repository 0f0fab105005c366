"""The metrics and times of one stage, read from files to which the run appends; each part is read once."""

from __future__ import annotations

import collections
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.tracking import jsonl
from jaxalign.tracking.alerts import WINDOW, Alert, Alerts
from jaxalign.tracking.metrics import to_numbers

_NO_RATE = ("start", "first step")  # Phases that contain compilation or no steps.


class Tail:
    """The rows of a JSONL file that have been appended since the last call of `read`.

    Attributes:
      path: the file.
      replaced: whether the last `read` found another file than the one before, and began again at its first row.
    """

    def __init__(self, path: Path):
        self.path, self.replaced = path, False
        self._offset = self._lines = 0
        self._inode: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The new complete rows; none if the file does not exist.

        A resumed run replaces its metric file by a shorter one, which is then read from the beginning.

        Raises:
          UserError: a line is not a JSON object.
        """
        try:
            file = open(self.path, "rb")
        except (FileNotFoundError, NotADirectoryError):
            self._begin(None)
            return []
        with file:
            stats = os.fstat(file.fileno())
            if stats.st_ino != self._inode or stats.st_size < self._offset:
                self._begin(stats.st_ino)
            else:
                self.replaced = False
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows = []
        for line in whole.decode("utf-8", "replace").split("\n")[:-1]:
            self._lines += 1
            if line.strip():
                rows.append(jsonl.parse_row(line, self.path, self._lines))
        self._offset += len(whole)
        return rows

    def _begin(self, inode: int | None) -> None:
        self.replaced = self._inode is not None or self._offset > 0
        self._inode, self._offset, self._lines = inode, 0, 0


class StageView:
    """A stage's folder. `read` takes in what has been appended.

    Attributes:
      folder: the folder.
      rows: the number of rows of metrics.jsonl.
      alerts: the alerts that they raise.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics, self._timing = Tail(folder / "metrics.jsonl"), Tail(folder / "timing.jsonl")
        self._restart()
        self._phases: dict[str, collections.Counter[str]] = {}
        self._peak = 0.0

    def _restart(self) -> None:
        self.rows, self._alerts = 0, Alerts()
        self._recent: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=WINDOW)

    @property
    def alerts(self) -> list[Alert]:
        return self._alerts.raised

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return int(self._recent[-1].get("step", self.rows - 1)) + 1 if self._recent else 0

    def read(self) -> None:
        """Reads the new rows. Raises UserError if one is damaged."""
        rows = self._metrics.read()
        if self._metrics.replaced:
            self._restart()
        for row in rows:
            numbers = to_numbers(row, self._metrics.path, self.rows + 1)
            self.rows += 1
            self._recent.append(numbers)
            if "step" in numbers:
                self._alerts.update(numbers)
        timed = self._timing.read()
        if self._timing.replaced:
            self._phases, self._peak = {}, 0.0
        for row in timed:
            phase = self._phases.setdefault(str(row.get("phase")), collections.Counter())
            for name in ("seconds", "tokens", "flops"):
                phase[name] += row.get(name) or 0
            self._peak = row.get("peak") or self._peak

    def mean(self, names: tuple[str, ...]) -> float | None:
        """The mean of a metric, by the first of these names that the rows have, over the last `WINDOW` rows."""
        for name in names:
            values = [row[name] for row in self._recent if name in row]
            if values:
                return statistics.fmean(values)
        return None

    def _rated(self, name: str) -> float:
        return sum(phase[name] for phase_name, phase in self._phases.items() if phase_name not in _NO_RATE)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all recorded phases except the start and the first step."""
        seconds, tokens = self._rated("seconds"), self._rated("tokens")
        return tokens / seconds if seconds and tokens else None

    @property
    def utilisation(self) -> float | None:
        """The FLOPs that the models need per second of wall-clock time, as a share of the devices' peak; None if unknown."""
        seconds, flops = self._rated("seconds"), self._rated("flops")
        return flops / seconds / self._peak if seconds and flops and self._peak else None

    def changed(self) -> float | None:
        """When a file of the stage was last written, in seconds since 1970; None without files."""
        times = [entry.stat().st_mtime for entry in self.folder.glob("*") if entry.is_file()]
        return max(times, default=None)
