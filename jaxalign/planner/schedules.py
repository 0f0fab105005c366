"""Schedules of RLHF on groups of devices, simulated from the seconds of each task of one iteration.

A task occupies each of its groups alone, from its start to its end. Batch n is trained by update n. Sources: flattening,
interleaving and separation, arXiv 2312.11819; the latency of a stage, arXiv 2409.19256.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

GENERATION, TRAINING = "generation", "training"


@dataclasses.dataclass(frozen=True)
class SimulatedTask:
    """A piece of work.

    Attributes:
      name: unique among the tasks of a simulation.
      groups: the groups of devices that it occupies.
      seconds: its duration.
      after: names of the tasks that must end before it starts.
    """

    name: str
    groups: tuple[str, ...]
    seconds: float
    after: tuple[str, ...] = ()


def simulate(tasks: Iterable[SimulatedTask]) -> dict[str, float]:
    """Runs the tasks of each group in the order of `tasks`, even if that leaves devices idle.

    Args:
      tasks: all tasks; each depends on earlier ones only.

    Returns:
      The seconds at which each task ends, by name.
    """
    ends: dict[str, float] = {}
    free: dict[str, float] = {}  # By group: when its last task ends.
    for task in tasks:
        waits = [ends[name] for name in task.after] + [free.get(group, 0.0) for group in task.groups]
        ends[task.name] = max(waits) + task.seconds
        free.update(dict.fromkeys(task.groups, ends[task.name]))
    return ends


@dataclasses.dataclass(frozen=True)
class TaskTimes:
    """Seconds of the tasks of one iteration, each on the devices that the schedule gives it.

    Attributes:
      generate: sampling of the batch, until its longest response ends.
      reference: log-probabilities of the reference policy.
      rewards: one entry for each reward model.
      value: values of the critic.
      advantages: rewards per token, advantages and returns.
      policy_update: all epochs over the batch.
      critic_update: the same for the critic.
      transfer: the policy's weights, from their layout for training to that for generation.
    """

    generate: float
    reference: float = 0.0
    rewards: tuple[float, ...] = ()
    value: float = 0.0
    advantages: float = 0.0
    policy_update: float = 0.0
    critic_update: float = 0.0
    transfer: float = 0.0

    @property
    def scoring(self) -> dict[str, float]:
        """Seconds by name of the forward passes, which need the responses and not each other; absent models are left out."""
        rewards = {f"reward {n}": seconds for n, seconds in enumerate(self.rewards)}
        passes = {"reference": self.reference, **rewards, "value": self.value}
        return {name: seconds for name, seconds in passes.items() if seconds}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The outcome of a schedule: `update_ends` [U] has the seconds at which each update's weights reach the generator."""

    update_ends: tuple[float, ...]

    @property
    def seconds_per_update(self) -> float:
        """Seconds per update in the steady state: from the middle of the run to the last update but one.

        The pipeline fills before and drains after. Of one or two updates, the mean.
        """
        updates = len(self.update_ends)
        if updates < 3:
            return self.update_ends[-1] / updates
        last = updates - 2
        first = min((updates - 1) // 2, last - 1)
        return (self.update_ends[last] - self.update_ends[first]) / (last - first)


def flat(times: TaskTimes, updates: int) -> Schedule:
    """All models on all devices: every task in turn, on one group named "all"."""
    return _schedule(_in_turn(times, updates, ("all",), ("all",), [("all",)] * len(times.scoring)), updates)


def interleave(times: TaskTimes, updates: int, parts: Sequence[Sequence[str]]) -> Schedule:
    """Generation on all devices; forward passes without mutual dependencies on exclusive parts, at the same time.

    Args:
      times: seconds on the devices that the task occupies: a pass takes longer on its part than on all devices.
      updates: the number of updates.
      parts: the passes on each part, by the names in `times.scoring`; each pass is on one part.
    """
    groups = tuple(f"part {n}" for n in range(len(parts)))
    owner = {name: groups[n] for n, part in enumerate(parts) for name in part}
    return _schedule(_in_turn(times, updates, groups, groups, [(owner[name],) for name in times.scoring]), updates)


def separate(times: TaskTimes, updates: int, scoring: Literal["generation", "training"] = GENERATION) -> Schedule:
    """Synchronous, with a generation group and a training group: while one works, the other waits.

    Args:
      times: seconds on the group that runs the task.
      updates: the number of updates.
      scoring: the group that runs the forward passes, in turn.
    """
    places = [(scoring,)] * len(times.scoring)
    return _schedule(_in_turn(times, updates, (GENERATION,), (TRAINING,), places), updates)


def one_step_ahead(times: TaskTimes, updates: int, scoring: Literal["generation", "training"] = GENERATION) -> Schedule:
    """Separate groups; generation of batch n+1 with the weights of update n-1 while batch n is trained.

    The weights of update n reach the generation group before it starts batch n+2. In the steady state an update takes
    max(generation + scoring, training) + transfer, where scoring counts on the side that runs it.

    Args:
      times: seconds on the group that runs the task.
      updates: the number of updates.
      scoring: the group that runs the forward passes, in turn.
    """
    tasks: list[SimulatedTask] = []
    places = [(scoring,)] * len(times.scoring)
    for n in range(updates + 1):
        if n < updates:
            after = (f"transfer {n - 2}",) if n > 1 else ()
            tasks.append(SimulatedTask(f"generate {n}", (GENERATION,), times.generate, after))
            if scoring == GENERATION:
                tasks += _score(times, n, places)
        if n > 0:
            if scoring == TRAINING:
                tasks += _score(times, n - 1, places)
            tasks += _train(times, n - 1, (TRAINING,), _scored(times, n - 1))
            tasks.append(_transfer(times, n - 1, (GENERATION, TRAINING)))
    return _schedule(tasks, updates)


def _in_turn(times: TaskTimes, updates: int, generator: tuple[str, ...], trainer: tuple[str, ...],
             places: Sequence[tuple[str, ...]]) -> list[SimulatedTask]:
    """Iterations one after the other: generation, then the passes on their groups (`places`), then training."""
    tasks: list[SimulatedTask] = []
    for n in range(updates):
        after = (f"transfer {n - 1}",) if n else ()
        tasks.append(SimulatedTask(f"generate {n}", generator, times.generate, after))
        tasks += _score(times, n, places)
        tasks += _train(times, n, trainer, _scored(times, n))
        tasks.append(_transfer(times, n, tuple(dict.fromkeys(generator + trainer))))
    return tasks


def _score(times: TaskTimes, n: int, places: Sequence[tuple[str, ...]]) -> list[SimulatedTask]:
    return [SimulatedTask(f"{name} {n}", groups, seconds, (f"generate {n}",))
            for (name, seconds), groups in zip(times.scoring.items(), places, strict=True)]


def _scored(times: TaskTimes, n: int) -> list[str]:
    """Names of the tasks that must end before batch n is trained."""
    return [f"{name} {n}" for name in ("generate", *times.scoring)]


def _train(times: TaskTimes, n: int, groups: tuple[str, ...], after: Sequence[str]) -> list[SimulatedTask]:
    return [
        SimulatedTask(f"advantages {n}", groups, times.advantages, tuple(after)),
        SimulatedTask(f"policy update {n}", groups, times.policy_update, (f"advantages {n}",)),
        SimulatedTask(f"critic update {n}", groups, times.critic_update, (f"advantages {n}",)),
    ]


def _transfer(times: TaskTimes, n: int, groups: tuple[str, ...]) -> SimulatedTask:
    return SimulatedTask(f"transfer {n}", groups, times.transfer, (f"policy update {n}", f"critic update {n}"))


def _schedule(tasks: list[SimulatedTask], updates: int) -> Schedule:
    ends = simulate(tasks)
    return Schedule(tuple(ends[f"transfer {n}"] for n in range(updates)))
