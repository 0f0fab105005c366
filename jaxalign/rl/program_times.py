"""Records when each program of an iteration ran on each group of devices, for roles on meshes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.machine import numbered
from jaxalign.placement.roles import role_of
from jaxalign.tracking import device_times
from jaxalign.tracking.device_times import IterationTimes, ProgramTime

T = TypeVar("T")


class RunProgram(Protocol):
    """Calls a function that starts a program, and may record the program's time."""

    def __call__(
        self, name: str, role: str, start: Callable[[], T], needs: Sequence[str] = (),
        watched: Callable[[T], Any] = lambda result: result,
    ) -> T:
        """The result of `start()`.

        Args:
          name: the program.
          role: the role on whose devices it runs.
          start: starts it, or runs it to its end.
          needs: the names of programs on other devices whose results it reads.
          watched: the arrays of the result that no later program donates; the program ends when they are ready.
        """


def unrecorded(name: str, role: str, start: Callable[[], T], *_: Any, **__: Any) -> T:
    """The result of `start()`: a `RunProgram` that records nothing."""
    return start()


def device_groups(shardings: Mapping[str, Sharding]) -> dict[str, tuple[str, ...]]:
    """The largest sets of devices with the same roles, by the numbers of their devices ("0-3"), in the order of the devices.

    shardings: the mesh of each role.
    """
    number = {device: i for i, device in enumerate(numbered(jax.devices()))}
    roles: dict[int, tuple[str, ...]] = {}
    for role, sharding in shardings.items():
        for device in sharding.mesh.devices.flat:
            roles[number[device]] = (*roles.get(number[device], ()), role)
    devices: dict[tuple[str, ...], list[int]] = {}
    for i in sorted(roles):
        devices.setdefault(roles[i], []).append(i)
    return {_ranges(numbers): names for names, numbers in devices.items()}


def _ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as ranges: [0, 1, 2, 5] is "0-2, 5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def recorded_in(directory: Path | None, shardings: Mapping[str, Sharding] | None) -> ProgramTimes:
    """The record of a run in its directory. A run in memory, or one whose roles share a mesh, records nothing.

    shardings: the mesh of each role; None if all have the policy's.
    """
    if directory is None or shardings is None:
        return ProgramTimes(None, {})
    return ProgramTimes(directory / device_times.FILE, device_groups(shardings))


@dataclasses.dataclass(eq=False)
class _Started:
    """A program that was started. `started` and `ended` are times by the clock."""

    name: str
    groups: tuple[str, ...]
    started: float
    needs: tuple[_Started, ...]
    ended: float = 0.0


class ProgramTimes:
    """Times the programs of iterations, without waiting for them.

    JAX starts programs asynchronously and a device runs them in the order of their start. For each group of devices, a thread
    waits for their results in this order and reads the clock. A program is taken to begin when it has been started, the
    program before it on its devices has ended, and the programs whose results it needs have ended. A program that runs on
    several groups begins and ends on all of them at the same time. A program that the host runs to its end, such as sampling,
    counts from its start to its end, including the time in which the host works between its steps; a copy counts for the
    devices that receive it.

    Times are about 0.1 ms late, because a thread must wake up. The cost per program and group is one task of a thread: about
    0.1 ms of processor time, of which the caller waits for 0.02 ms. The thread does not hold Python's lock while it waits, and
    the devices do no additional work. Each iteration adds one line of about 1 kB to the file.

    Args:
      path: the file (`tracking.device_times`); None records nothing.
      groups: the roles on each group of devices (`device_groups`).
      clock: for tests.
    """

    def __init__(
        self, path: Path | None, groups: Mapping[str, tuple[str, ...]], clock: Callable[[], float] = time.perf_counter
    ):
        self._path, self._groups, self._clock = path, groups, clock
        self._waiting = {group: ThreadPoolExecutor(1, f"devices {group}") for group in groups}
        self._lock = threading.Lock()
        self._programs: list[_Started] | None = None  # None between iterations.
        self._opened = False

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Records the programs that the body starts. At its end, their results must be ready. The first iteration drops the
        file's rows of it and of later ones."""
        if self._path is None:
            yield
            return
        if first := not self._opened:
            device_times.drop_from(self._path, number)
            self._opened = True
        began, self._programs = self._clock(), []
        try:
            yield
            for waiting in self._waiting.values():
                waiting.submit(int).result()  # The tasks before it have ended.
            programs, seconds = self._timed(began), self._clock() - began
        finally:
            self._programs = None
        if device_times.is_recorded(number):
            device_times.append(self._path, IterationTimes(number, first, seconds, self._groups, programs))

    def run(
        self, name: str, role: str, start: Callable[[], T], needs: Sequence[str] = (),
        watched: Callable[[T], Any] = lambda result: result,
    ) -> T:
        """See `RunProgram`. Outside of an iteration, and for a role that is not placed, nothing is recorded."""
        groups = self._groups_of(role) or self._groups_of(role_of(role).shadows)
        if self._programs is None or not groups:
            return start()
        with self._lock:
            latest = {program.name: program for program in self._programs}
            program = _Started(name, groups, self._clock(), tuple(latest[need] for need in needs if need in latest))
            self._programs.append(program)
        result = start()
        arrays = [x for x in jax.tree.leaves(watched(result)) if isinstance(x, jax.Array)]
        for group in groups:
            self._waiting[group].submit(self._wait, program, arrays)
        return result

    def _groups_of(self, role: str) -> tuple[str, ...]:
        return tuple(group for group, roles in self._groups.items() if role in roles)

    def _wait(self, program: _Started, arrays: list[jax.Array]) -> None:
        with contextlib.suppress(Exception):  # The error of a program is raised where its result is used.
            jax.block_until_ready(arrays)
        with self._lock:
            program.ended = max(program.ended, self._clock())

    def _timed(self, began: float) -> tuple[ProgramTime, ...]:
        """The programs of the iteration with their times since `began`."""
        free, timed = dict.fromkeys(self._groups, began), []
        for program in self._programs or ():
            earlier = [free[group] for group in program.groups] + [need.ended for need in program.needs]
            start = min(max(program.started, *earlier), program.ended)
            timed.append(ProgramTime(program.name, program.groups, start - began, program.ended - began))
            free |= dict.fromkeys(program.groups, program.ended)
        return tuple(timed)
