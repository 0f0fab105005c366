"""When programs ran on each group of devices, in `device_times.jsonl` of a stage whose roles have devices of their own.

A row is an `IterationTimes` as JSON: {"iteration", "first", "seconds", "groups": {devices: [roles]}, "programs": [{"name",
"devices": [groups], "start", "end"}]}. Times are clock times in seconds since the iteration began, so they differ between equal
runs, and no result depends on the file.

Iterations 0 to 255 have a row each, later ones every 2nd, 4th, 8th, ... with each doubling of the number, so that a million
iterations have fewer than 2,000 rows of about 1 kB.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.storage import write_atomically
from jaxalign.tracking import jsonl

FILE = "device_times.jsonl"
_ALL = 256
"""The number of iterations at the start of a run that all have a row."""


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """A program's run.

    Attributes:
      name: the program, such as "generate".
      groups: the groups of devices that it ran on, keys of `IterationTimes.groups`.
      start, end: seconds since the iteration began.
    """

    name: str
    groups: tuple[str, ...]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class IterationTimes:
    """The programs of an iteration.

    Attributes:
      iteration: its number, counted from 0.
      first: whether it was the first of a start of the stage, which waits for the compiler.
      seconds: its duration, without the time between iterations (metrics, checkpoints).
      groups: the roles on each group of devices. A group is a largest set of devices with the same roles, written as "0-3".
      programs: in the order in which they were started. Those of one group do not overlap.
    """

    iteration: int
    first: bool
    seconds: float
    groups: Mapping[str, tuple[str, ...]]
    programs: tuple[ProgramTime, ...]

    def on(self, group: str) -> tuple[ProgramTime, ...]:
        """The programs that ran on a group."""
        return tuple(program for program in self.programs if group in program.groups)


def is_recorded(iteration: int) -> bool:
    """Whether an iteration has a row."""
    return iteration % (1 << (iteration // _ALL).bit_length()) == 0


def drop_from(path: str | os.PathLike, iteration: int) -> None:
    """Drops the rows of an iteration and of later ones, which a resumed stage runs again, and a row that a crash truncated."""
    rows = jsonl.read_rows(path)
    kept = [row for row in rows if row.get("iteration", -1) < iteration]
    if len(kept) < len(rows):
        write_atomically(Path(path), "".join(json.dumps(row) + "\n" for row in kept))
    jsonl.open_append(path).close()


def append(path: str | os.PathLike, times: IterationTimes) -> None:
    """Appends a row. Call `drop_from` first."""
    programs = [{"name": program.name, "devices": list(program.groups), "start": round(program.start, 6),
                 "end": round(program.end, 6)} for program in times.programs]
    row = {"iteration": times.iteration, "first": times.first, "seconds": round(times.seconds, 6),
           "groups": {group: list(roles) for group, roles in times.groups.items()}, "programs": programs}
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row) + "\n")


def read_device_times(path: str | os.PathLike) -> list[IterationTimes]:
    """The rows of a file, oldest first. A missing file has none.

    Raises:
      UserError: a complete line is not a row.
    """
    return [_from_row(row, path, number) for number, row in enumerate(jsonl.read_rows(path), 1)]


def _from_row(row: Mapping[str, Any], path: str | os.PathLike, number: int) -> IterationTimes:
    try:
        groups = {str(group): tuple(map(str, roles)) for group, roles in row["groups"].items()}
        programs = tuple(
            ProgramTime(str(one["name"]), tuple(map(str, one["devices"])), float(one["start"]), float(one["end"]))
            for one in row["programs"]
        )
        return IterationTimes(int(row["iteration"]), bool(row["first"]), float(row["seconds"]), groups, programs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}, row {number} has another form than expected ({type(error).__name__}: {error}); remove the "
                        "row, or the file, which no result depends on") from None


def busy_seconds(rows: Sequence[IterationTimes], group: str) -> dict[str, float]:
    """The seconds for which a group ran each program, by name in the order of their first start."""
    totals: dict[str, float] = {}
    for program in (program for row in rows for program in row.on(group)):
        totals[program.name] = totals.get(program.name, 0.0) + program.seconds
    return totals


def seconds_without_programs(row: IterationTimes) -> float:
    """The seconds of an iteration in which no group ran a program."""
    busy = reached = 0.0
    for program in sorted(row.programs, key=lambda program: program.start):
        busy += max(0.0, program.end - max(program.start, reached))
        reached = max(reached, program.end)
    return row.seconds - busy
