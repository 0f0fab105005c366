"""The time of a stage by phase, in `timing.jsonl`. `device_times.py` has the times of single programs.

A row is {"phase", "seconds", "tokens", "flops", "peak"}, plus "since" for a first step. A row covers one run of a phase or the
sum over several runs. Every start of the stage appends rows, so totals over the file are the cost of the stage, including
interrupted starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.tracking import jsonl


class PhaseTotal(TypedDict):
    """The cost of one phase.

    Attributes:
      seconds: wall-clock time.
      tokens: tokens processed.
      flops: FLOPs that the models need; 0 if they are not counted.
      peak: the vendor's peak FLOP/s, summed over all devices; 0 if unknown.
      runs: the number of rows.
      since: seconds from the stage's last start to the end of the phase; 0 if unknown.
    """

    seconds: float
    tokens: int
    flops: float
    peak: float
    runs: int
    since: float


@dataclasses.dataclass
class Phase:
    """A running phase. Set `tokens` and `flops` inside the phase if they are known only at its end."""

    tokens: int = 0
    flops: float = 0.0


class Timing:
    """Appends to the timing file at `path`. Phases must not be nested, because their time would count twice.

    Args:
      path: the file.
      peak: peak FLOP/s over all devices; 0 if unknown.
      clock: for tests.
    """

    def __init__(self, path: str | os.PathLike, peak: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self.path = Path(path)
        self._peak, self._clock = peak, clock

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Times the body and appends a row, even if the body raises.

        JAX computes asynchronously, so the body must wait for its results (`block_until_ready`, or read them).
        """
        phase = Phase(tokens)
        began = self._clock()
        try:
            yield phase
        finally:
            self.add(name, self._clock() - began, phase.tokens, phase.flops)

    def add(self, name: str, seconds: float, tokens: int = 0, flops: float = 0.0, since: float | None = None) -> None:
        """Appends a row for a time measured elsewhere, such as the sum of many short phases. Only the first process writes."""
        if not hosts.is_first():
            return
        row = {"phase": name, "seconds": round(seconds, 6), "tokens": int(tokens), "flops": flops, "peak": self._peak}
        row |= {} if since is None else {"since": round(since, 6)}
        with jsonl.open_append(self.path) as file:
            file.write(json.dumps(row) + "\n")


@dataclasses.dataclass
class Timeline:
    """Times the phases of a loop's steps, which are too short for a row each, and accumulates them until `write`."""

    clock: Callable[[], float] = time.perf_counter
    _sums: dict[str, tuple[float, Phase]] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Times the body, which must wait for its results, and adds the tokens and FLOPs set on the yielded phase."""
        phase, began = Phase(), self.clock()
        yield phase
        seconds, sums = self._sums.get(name, (0.0, Phase()))
        sums.tokens, sums.flops = sums.tokens + phase.tokens, sums.flops + phase.flops
        self._sums[name] = seconds + self.clock() - began, sums

    def clear(self) -> None:
        """Discards the accumulated times."""
        self._sums.clear()

    def write(self, timing: Timing, seconds: float, rest: str, tokens: int, flops: float = 0.0) -> None:
        """Writes a row for each phase, and a row named `rest` for the part of `seconds` outside all phases.

        `tokens` and `flops` go to the row `rest` if there are no other phases.
        """
        for name, (spent, phase) in self._sums.items():
            timing.add(name, spent, phase.tokens, phase.flops)
            seconds -= spent
        timing.add(rest, max(0.0, seconds), *((0, 0.0) if self._sums else (tokens, flops)))
        self.clear()


@contextlib.contextmanager
def rest_of(path: str | os.PathLike, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """A context for a whole stage: appends the time outside its phases as "other", if it has phases."""
    before, began = sum(total["seconds"] for total in read_timing(path).values()), clock()
    try:
        yield
    finally:
        if Path(path).exists():
            in_phases = sum(total["seconds"] for total in read_timing(path).values()) - before
            Timing(path).add("other", max(0.0, clock() - began - in_phases))


def read_timing(path: str | os.PathLike) -> dict[str, PhaseTotal]:
    """Totals by phase, in the order in which the phases first ran. A missing file has no phases.

    Raises:
        UserError: a complete line is not a JSON object, or a total in it is not a number.
    """
    totals: dict[str, PhaseTotal] = {}
    for number, row in enumerate(jsonl.read_rows(path), 1):
        wrong = next((name for name in _NUMBERS if not isinstance(row.get(name) or 0, (int, float))), None)
        if wrong is not None:
            raise UserError(f"{path}, row {number}: {wrong} is {row[wrong]!r}; a number is expected: fix or remove the row")
        nothing = PhaseTotal(seconds=0.0, tokens=0, flops=0.0, peak=0.0, runs=0, since=0.0)
        total = totals.setdefault(str(row.get("phase")), nothing)
        for name in ("seconds", "tokens", "flops"):
            total[name] += row.get(name) or 0
        for name in ("peak", "since"):
            total[name] = float(row.get(name) or total[name])
        total["runs"] += 1
    return totals


_NUMBERS = ("seconds", "tokens", "flops", "peak", "since")
