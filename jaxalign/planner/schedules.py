"""Schedules of RLHF on groups of devices, built from the seconds of each task of one iteration.

Batch n is trained by update n. Its staleness is the number of updates between the weights that sampled it and the weights that
it updates. Asynchronous schedules, which work sample by sample, are in `asynchronous`. Sources: flattening, interleaving and
separation, arXiv 2312.11819; the latency of a stage, arXiv 2409.19256.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxalign.errors import UserError
from jaxalign.planner.simulator import SimulatedTask, SimulatedTimeline, simulate

GENERATION, TRAINING = "generation", "training"
FREED = "generation, freed"
"""The devices of the generation group whose responses end before the long tail."""


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

    @property
    def training(self) -> float:
        """Seconds of the tasks that turn scores into new weights, in turn."""
        return self.advantages + self.policy_update + self.critic_update

    def scaled(self, generation: float = 1.0, scoring: float = 1.0, training: float = 1.0) -> TaskTimes:
        """The times with each kind of task multiplied by a factor, 2 for work that is given half of its devices, for example.

        The weight transfer keeps its time.
        """
        return TaskTimes(
            generation * self.generate, scoring * self.reference, tuple(scoring * seconds for seconds in self.rewards),
            scoring * self.value, training * self.advantages, training * self.policy_update, training * self.critic_update,
            self.transfer,
        )


@dataclasses.dataclass(frozen=True)
class GenerationTail:
    """The end of generation, when few responses still run (RLHFuse scores the finished ones meanwhile).

    Attributes:
      seconds: how long the tail lasts; it is part of TaskTimes.generate.
      unfinished: the share of the batch that ends within the tail.
      freed: the share of the generation devices that the tail does not use, above 0 and at most 1.
    """

    seconds: float
    unfinished: float
    freed: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The outcome of a schedule.

    Attributes:
      seconds: seconds until the last update and its weight transfer end.
      update_ends: [U] seconds at which each update's weights reach the generator.
      idle: share of `seconds` that each group of devices is idle.
      staleness: share of the trained samples by staleness, in updates.
      timeline: the tasks; None for asynchronous schedules.
    """

    seconds: float
    update_ends: tuple[float, ...]
    idle: dict[str, float]
    staleness: dict[int, float]
    timeline: SimulatedTimeline | None = None

    @property
    def seconds_per_update(self) -> float:
        """Seconds per update in the steady state: from the middle of the run to the last update but one.

        The pipeline fills before and drains after. Of one or two updates, the mean. Asynchronous updates with staleness bound
        eta may come in bursts of eta + 1, so simulate at least 10 (eta + 1) updates.
        """
        updates = len(self.update_ends)
        if updates < 3:
            return self.seconds / updates
        last = updates - 2
        first = min((updates - 1) // 2, last - 1)
        return (self.update_ends[last] - self.update_ends[first]) / (last - first)


def flat(times: TaskTimes, updates: int) -> Schedule:
    """All models on all devices: every task in turn, on one group named "all". Raises UserError if `updates` is below 1."""
    return _schedule(_in_turn(times, updates, ("all",), ("all",), [("all",)] * len(times.scoring)), updates)


def interleave(times: TaskTimes, updates: int, parts: Sequence[Sequence[str]] | None = None,
               side_by_side: int = 0) -> Schedule:
    """Generation on all devices; forward passes without mutual dependencies on exclusive parts, at the same time.

    Args:
      times: seconds on the devices that the task occupies: a pass takes longer on its part than on all devices.
      updates: the number of updates.
      parts: the passes on each part, by the names in `times.scoring`; by default each pass has a part of its own.
      side_by_side: 0 runs the policy's and the critic's update in turn, each on all parts. Otherwise they run at the same time,
        the policy's on the first `side_by_side` parts and the critic's on the others.

    Raises:
      UserError: `updates` is below 1, a pass is on no part, on two parts, or unknown, or `side_by_side` leaves one update
        without devices.
    """
    passes = list(times.scoring)
    parts = [[name] for name in passes] if parts is None else [list(part) for part in parts]
    if sorted(name for part in parts for name in part) != sorted(passes):
        raise UserError(f"parts is {parts}, but the passes are {', '.join(passes) or 'none'}; "
                        "place each pass on exactly one part")
    groups = tuple(f"part {n}" for n in range(max(1, len(parts))))
    if side_by_side and not 0 < side_by_side < len(groups):
        raise UserError(f"side_by_side is {side_by_side} of {len(groups)} parts; leave at least one part for the critic's "
                        "update, or set it to 0")
    owner = {name: groups[n] for n, part in enumerate(parts) for name in part}
    tasks = _in_turn(times, updates, groups, groups, [(owner[name],) for name in passes], side_by_side)
    return _schedule(tasks, updates)


def separate(times: TaskTimes, updates: int, scoring: Literal["generation", "training"] = GENERATION,
             tail: GenerationTail | None = None) -> Schedule:
    """Synchronous, with a generation group and a training group: while one works, the other waits.

    Args:
      times: seconds on the group that runs the task.
      updates: the number of updates.
      scoring: the group that runs the forward passes, in turn.
      tail: scores finished responses on the freed devices of the generation group during the tail of generation; None waits for
        the whole batch.

    Raises:
      UserError: `updates` is below 1, the tail is longer than generation or has impossible shares, or scoring runs on the
        training group although there is a tail.
    """
    if tail is None:
        places = [(scoring,)] * len(times.scoring)
        return _schedule(_in_turn(times, updates, (GENERATION,), (TRAINING,), places), updates)
    if scoring != GENERATION:
        raise UserError("scoring during the tail needs the generation group; set scoring to 'generation' or tail to None")
    if not (0 <= tail.seconds <= times.generate and 0 <= tail.unfinished <= 1 and 0 < tail.freed <= 1):
        raise UserError(f"the tail is {dataclasses.asdict(tail)}; its seconds must be within those of generation "
                        f"({times.generate}), and its shares between 0 and 1, with freed above 0")
    tasks: list[SimulatedTask] = []
    for n in range(updates):
        tasks += _generate_with_tail(times, tail, n)
        tasks += _train(times, n, (TRAINING,), [f"{name} {n}" for name in ("tail", *times.scoring)])
        tasks.append(_transfer(times, n, (GENERATION, FREED, TRAINING)))
    return _schedule(tasks, updates)


def one_step_ahead(times: TaskTimes, updates: int, scoring: Literal["generation", "training"] = GENERATION) -> Schedule:
    """Separate groups; generation of batch n+1 with the weights of update n-1 while batch n is trained: staleness 1.

    The weights of update n reach the generation group before it starts batch n+2. In the steady state an update takes
    max(generation + scoring, training) + transfer, where scoring counts on the side that runs it.

    Args:
      times: seconds on the group that runs the task.
      updates: the number of updates.
      scoring: the group that runs the forward passes, in turn.

    Raises:
      UserError: `updates` is below 1.
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
    return _schedule(tasks, updates, ahead=1)


def asynchronous_depth(generate: float, scoring: float, training: float) -> float:
    """Seconds of an iteration if training overlaps the generation and scoring of the next: max(generate + scoring, training).

    It costs one more copy of the policy. `scoring` is the sum over the models if they share devices, the maximum if each model
    has its own.
    """
    return max(generate + scoring, training)


def _in_turn(times: TaskTimes, updates: int, generator: tuple[str, ...], trainer: tuple[str, ...],
             places: Sequence[tuple[str, ...]], side_by_side: int = 0) -> list[SimulatedTask]:
    """Iterations one after the other: generation, then the passes on their groups (`places`), then training."""
    tasks: list[SimulatedTask] = []
    for n in range(updates):
        after = (f"transfer {n - 1}",) if n else ()
        tasks.append(SimulatedTask(f"generate {n}", generator, times.generate, after))
        tasks += _score(times, n, places)
        tasks += _train(times, n, trainer, _scored(times, n), side_by_side)
        tasks.append(_transfer(times, n, tuple(dict.fromkeys(generator + trainer))))
    return tasks


def _score(times: TaskTimes, n: int, places: Sequence[tuple[str, ...]]) -> list[SimulatedTask]:
    return [SimulatedTask(f"{name} {n}", groups, seconds, (f"generate {n}",))
            for (name, seconds), groups in zip(times.scoring.items(), places, strict=True)]


def _scored(times: TaskTimes, n: int) -> list[str]:
    """Names of the tasks that must end before batch n is trained."""
    return [f"{name} {n}" for name in ("generate", *times.scoring)]


def _train(
    times: TaskTimes, n: int, groups: tuple[str, ...], after: Sequence[str], side_by_side: int = 0
) -> list[SimulatedTask]:
    policy, critic = (groups[:side_by_side], groups[side_by_side:]) if side_by_side else (groups, groups)
    return [
        SimulatedTask(f"advantages {n}", groups, times.advantages, tuple(after)),
        SimulatedTask(f"policy update {n}", policy, times.policy_update, (f"advantages {n}",)),
        SimulatedTask(f"critic update {n}", critic, times.critic_update, (f"advantages {n}",)),
    ]


def _transfer(times: TaskTimes, n: int, groups: tuple[str, ...]) -> SimulatedTask:
    return SimulatedTask(f"transfer {n}", groups, times.transfer, (f"policy update {n}", f"critic update {n}"))


def _generate_with_tail(times: TaskTimes, tail: GenerationTail, n: int) -> list[SimulatedTask]:
    """Generation, with finished responses scored on the freed devices during the tail and the others on all devices after it.

    The freed devices score only as much as ends within the tail, so that the tail never delays the batch.
    """
    both = (GENERATION, FREED)
    early_tasks = [
        SimulatedTask(f"generate {n}", both, times.generate - tail.seconds, (f"transfer {n - 1}",) if n else ()),
        SimulatedTask(f"tail {n}", (GENERATION,), tail.seconds, (f"generate {n}",)),
    ]
    late_tasks, left = [], tail.seconds
    for name, seconds in times.scoring.items():
        # A pass over the whole batch takes seconds / freed on the freed devices.
        early = min((1 - tail.unfinished) * seconds / tail.freed, left)
        left -= early
        early_tasks.append(SimulatedTask(f"{name} early {n}", (FREED,), early, (f"generate {n}",)))
        late = max(0.0, seconds - early * tail.freed)  # Rounding can make the difference negative.
        late_tasks.append(SimulatedTask(f"{name} {n}", both, late, (f"tail {n}", f"{name} early {n}")))
    return early_tasks + late_tasks


def _schedule(tasks: list[SimulatedTask], updates: int, ahead: int = 0) -> Schedule:
    """Runs the tasks. Batch n is sampled by the weights of update n - 1 - ahead; the first weights have had no update."""
    if updates < 1:
        raise UserError(f"updates is {updates}; give at least 1")
    timeline = simulate(tasks)
    ends = {interval.name: interval.end for interval in timeline.intervals}
    counts = collections.Counter(min(n, ahead) for n in range(updates))
    staleness = {stale: count / updates for stale, count in counts.items()}
    idle = {group: use.idle_share for group, use in timeline.groups.items()}
    return Schedule(timeline.makespan, tuple(ends[f"transfer {n}"] for n in range(updates)), idle, staleness, timeline)
