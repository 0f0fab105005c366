"""A discrete-event simulator: tasks that occupy groups of devices become a timeline.

A task occupies each of its groups alone, from its start to its end. The result depends on the tasks and their order only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxalign.errors import UserError

Order = Literal["enqueued", "priority"]


@dataclasses.dataclass(frozen=True)
class SimulatedTask:
    """A piece of work.

    Attributes:
      name: unique among the tasks of a simulation.
      groups: the groups of devices that it occupies.
      seconds: its duration.
      after: names of the tasks that must end before it starts.
      priority: where order is "priority", the smallest number starts first; ties start in the order of the sequence.
    """

    name: str
    groups: tuple[str, ...]
    seconds: float
    after: tuple[str, ...] = ()
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class BusyInterval:
    """When a task runs: [start, end) in seconds, and the groups that it occupies."""

    name: str
    groups: tuple[str, ...]
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """The seconds that a group is busy and idle between the start of the timeline and its end."""

    busy: float
    idle: float

    @property
    def idle_share(self) -> float:
        total = self.busy + self.idle
        return self.idle / total if total else 0.0


@dataclasses.dataclass(frozen=True)
class SimulatedTimeline:
    """The result of a simulation.

    Attributes:
      intervals: one for each task, in the order of the tasks.
      makespan: seconds until the last task ends.
      groups: the use of each group, in the order in which the tasks name them.
      critical_path: names of tasks, first to last. Each waits for its predecessor, either for its result or for its devices,
        and their seconds sum to the makespan.
      depth: seconds of the longest chain of dependencies: the makespan if every task had devices of its own.
    """

    intervals: tuple[BusyInterval, ...]
    makespan: float
    groups: dict[str, GroupUse]
    critical_path: tuple[str, ...]
    depth: float

    def __getitem__(self, name: str) -> BusyInterval:
        """The interval of the task `name`. Raises KeyError if there is none."""
        for interval in self.intervals:
            if interval.name == name:
                return interval
        raise KeyError(name)


def simulate(tasks: Iterable[SimulatedTask], order: Order = "enqueued") -> SimulatedTimeline:
    """Runs the tasks.

    Args:
      tasks: all tasks; a task may depend on a later one.
      order: "enqueued" starts the tasks of each group in the order of `tasks`, even if that leaves devices idle. "priority"
        starts, whenever devices become free, the ready task with the smallest priority.

    Raises:
      UserError: a duration is negative or not finite, a task has no groups, names repeat, a dependency is unknown, or tasks
        wait for each other.
    """
    tasks = tuple(tasks)
    _check(tasks)
    index = {task.name: i for i, task in enumerate(tasks)}
    after = [[index[name] for name in task.after] for task in tasks]
    depth = max(_longest(tasks, after), default=0.0)
    if order == "enqueued":
        waits = _with_queues(tasks, after)
        ends = _longest(tasks, waits)
    else:
        ends, waits = _by_priority(tasks, after)
    makespan = max(ends, default=0.0)
    intervals = tuple(
        BusyInterval(task.name, task.groups, max((ends[i] for i in waits[n]), default=0.0), ends[n])
        for n, task in enumerate(tasks)
    )
    busy: dict[str, float] = {}
    for task in tasks:
        for group in dict.fromkeys(task.groups):
            busy[group] = busy.get(group, 0.0) + task.seconds
    groups = {group: GroupUse(seconds, max(0.0, makespan - seconds)) for group, seconds in busy.items()}
    return SimulatedTimeline(intervals, makespan, groups, _critical_path(tasks, ends, waits), depth)


def stage_latency(groups: Sequence[Sequence[float]]) -> float:
    """Seconds of a stage: the maximum over groups of the sum of the seconds within a group (arXiv 2409.19256, Algorithm 1)."""
    return max((math.fsum(seconds) for seconds in groups), default=0.0)


def _check(tasks: tuple[SimulatedTask, ...]) -> None:
    names = set()
    for task in tasks:
        if task.name in names:
            raise UserError(f"two tasks are named {task.name!r}; give each task a name of its own")
        names.add(task.name)
    for task in tasks:
        if not (math.isfinite(task.seconds) and task.seconds >= 0):
            raise UserError(f"task {task.name!r} takes {task.seconds} seconds; give a finite number of at least 0")
        if not task.groups:
            raise UserError(f"task {task.name!r} occupies no group of devices; name at least one group")
        for name in task.after:
            if name not in names:
                raise UserError(f"task {task.name!r} depends on {name!r}, which is not a task; add that task or drop the "
                                "dependency")


def _with_queues(tasks: tuple[SimulatedTask, ...], after: list[list[int]]) -> list[list[int]]:
    """The tasks that each task waits for: its dependencies, then the task before it on each of its groups."""
    last: dict[str, int] = {}
    waits = []
    for n, task in enumerate(tasks):
        queued = {last[group] for group in task.groups if group in last}
        waits.append(after[n] + sorted(queued.difference(after[n])))
        last.update(dict.fromkeys(task.groups, n))
    return waits


def _longest(tasks: tuple[SimulatedTask, ...], waits: list[list[int]]) -> list[float]:
    """The end of each task if it starts as soon as all tasks that it waits for have ended. Raises UserError for cycles."""
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(some) for some in waits]
    for n, some in enumerate(waits):
        for i in some:
            followers[i].append(n)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    ready = [n for n, count in enumerate(missing) if count == 0]
    for n in ready:  # The list grows while the loop runs.
        ends[n] = starts[n] + tasks[n].seconds
        for follower in followers[n]:
            starts[follower] = max(starts[follower], ends[n])
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if len(ready) < len(tasks):
        raise _cycle(tasks, waits, missing)
    return ends


def _cycle(tasks: tuple[SimulatedTask, ...], waits: list[list[int]], missing: list[int]) -> UserError:
    """The error that names the tasks of one cycle."""
    n = next(n for n, count in enumerate(missing) if count)
    path: list[int] = []
    while n not in path:
        path.append(n)
        n = next(i for i in waits[n] if missing[i])
    names = [tasks[i].name for i in path[path.index(n):]]
    return UserError(f"tasks wait for each other: {' -> '.join([*names, names[0]])}; remove one of these dependencies, or "
                     "enqueue the tasks of each group in an order that respects them")


def _by_priority(tasks: tuple[SimulatedTask, ...], after: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """(the end of each task, the tasks that each waited for) if ready tasks start in the order of their priority."""
    waiting = sorted(range(len(tasks)), key=lambda n: (tasks[n].priority, n))
    ends: list[float] = [math.inf] * len(tasks)
    waits: list[list[int]] = [list(some) for some in after]
    last: dict[str, int] = {}
    now = 0.0
    while waiting:
        for n in waiting:
            holders = {last[group] for group in tasks[n].groups if group in last}
            if all(ends[i] <= now for i in (*after[n], *holders)):
                break
        else:
            now = min(end for end in ends if now < end < math.inf)
            continue
        waits[n] += sorted(holders.difference(after[n]))
        ends[n] = now + tasks[n].seconds
        last.update(dict.fromkeys(tasks[n].groups, n))
        waiting.remove(n)
    return ends, waits


def _critical_path(tasks: tuple[SimulatedTask, ...], ends: list[float], waits: list[list[int]]) -> tuple[str, ...]:
    if not tasks:
        return ()
    n = max(range(len(tasks)), key=lambda n: ends[n])
    path = [n]
    while waits[n]:
        n = max(waits[n], key=lambda i: ends[i])
        path.append(n)
    return tuple(tasks[n].name for n in reversed(path))
