"""Where a stage's time goes: `timing.jsonl`, the only file of a run that holds clocks.

A row is {"phase", "seconds", "tokens"}. Each phase appends a row each time it runs, in every process that worked on
the stage, so totals over the file are the time the stage cost in all, interruptions included.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from jaxalign.parallel import hosts
from jaxalign.tracking import jsonl


class PhaseTotal(TypedDict):
    """What one phase cost: wall-clock seconds, tokens handled, times run."""

    seconds: float
    tokens: int
    runs: int


class Phase:
    """A phase that is running; set `tokens` when the count is known only at the end."""

    def __init__(self, tokens: int = 0):
        self.tokens = tokens


class Timing:
    """Appends to the timing file at `path`. Phases are not nested: nested ones would count their time twice."""

    def __init__(self, path: str | os.PathLike, clock: Callable[[], float] = time.perf_counter):
        self.path = Path(path)
        self._clock = clock

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Times the body and appends its row, also when the body raises: the time was spent.

        JAX computes asynchronously: wait for the results (`block_until_ready`, or read them) inside the body.
        """
        phase = Phase(tokens)
        began = self._clock()
        try:
            yield phase
        finally:
            self.add(name, self._clock() - began, phase.tokens)

    def add(self, name: str, seconds: float, tokens: int = 0) -> None:
        """Appends a row that was timed elsewhere, for phases too short to write one by one. The first process's time counts."""
        if not hosts.is_first():
            return
        row = {"phase": name, "seconds": round(seconds, 6), "tokens": int(tokens)}
        with jsonl.open_append(self.path) as file:
            file.write(json.dumps(row) + "\n")


def read_timing(path: str | os.PathLike) -> dict[str, PhaseTotal]:
    """Totals by phase, in the order in which the phases first ran. Missing file: none.

    Raises:
        UserError: a complete line is not a JSON object.
    """
    totals: dict[str, PhaseTotal] = {}
    for row in jsonl.read_rows(path):
        total = totals.setdefault(str(row.get("phase")), PhaseTotal(seconds=0.0, tokens=0, runs=0))
        total["seconds"] += float(row.get("seconds") or 0.0)
        total["tokens"] += int(row.get("tokens") or 0)
        total["runs"] += 1
    return totals
