"""The tasks of a stage with roles on devices of their own: each task on the mesh of the role that runs it. The time of an
iteration, in the order in which `rl.placed` starts the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from jaxalign.placement.plan import Placement
from jaxalign.planner.estimate import TaskEstimator
from jaxalign.planner.programs import Run, Task, estimated_tasks
from jaxalign.planner.schedules import SimulatedTask, simulate

MODELS = {"reward": "preference model", "generator": "policy", "value": "critic"}
"""The role of a model in the planner, by the role of a placement, where the names differ."""
_ITERATIONS = 6
"""Simulated iterations: the steady state needs no more."""


@dataclasses.dataclass(frozen=True)
class PlacedTask:
    """A task, and the role of the placement on whose mesh it runs."""

    role: str
    task: Task


def placed_tasks(estimator: Callable[[str], TaskEstimator], placement: Placement, stage: str, prompt: int | None,
                 examples: int | None) -> list[PlacedTask]:
    """The tasks of a stage. estimator: returns that of a role of the placement; the other arguments are as in `Run`."""
    def tasks_on(role: str) -> dict[str, Task]:
        """By phase, the tasks as if all roles had the mesh of one. Those of judges are left out."""
        on = estimator(role)
        every = [dataclasses.replace(task, stays=(), fused=())
                 for task in estimated_tasks(Run(on.config, on.policy, prompt, examples), (stage,))]
        return {task.phase: task for task in every if not task.runs[0].startswith(("judge", "labeller"))}

    sampler = placement.serving("generator").role
    found = [PlacedTask(sampler, tasks_on(sampler)["generate"])]
    whole = tasks_on("policy")
    policy, critic = placement.roles["policy"], placement.roles.get("critic")
    apart = critic is not None and (policy.devices, policy.mesh) != (critic.devices, critic.mesh)
    scored = dict.fromkeys(whole["score"].runs)
    if apart:  # A critic on a mesh of its own computes values before the update.
        scored["critic"] = None
    for name in scored:
        role = placement.serving("value").role if name == "critic" else name
        found.append(PlacedTask(role, dataclasses.replace(tasks_on(role)["score"], runs=(name,))))
    if "reward" in placement.roles and "reward" in whole:
        found.append(PlacedTask("reward", tasks_on("reward")["reward"]))
    update = whole["update"]
    if not apart:
        return [*found, PlacedTask("policy", update)]
    for role in update.trains:
        found.append(PlacedTask(role, dataclasses.replace(tasks_on(role)["update"], runs=(role,), trains=(role,))))
    return found


@dataclasses.dataclass(frozen=True)
class Durations:
    """The seconds of an iteration's tasks.

    Attributes:
      tasks: (role, phase, seconds), in the order of their start. A phase is that of `programs.Task`.
      moves: seconds in which the generator or the value role receives weights.
      groups: the groups of devices of each role.
      ahead: whether responses are sampled before the update, as with `ppo.sample_ahead`.
    """

    tasks: tuple[tuple[str, str, float], ...]
    moves: Mapping[str, float]
    groups: Mapping[str, tuple[str, ...]]
    ahead: bool = False

    @property
    def sampler(self) -> str:
        """The role that samples."""
        return next(role for role, phase, _ in self.tasks if phase == "generate")

    @property
    def beside(self) -> list[str]:
        """The roles with devices in common with the sampler's."""
        own = set(self.groups[self.sampler])
        return [role for role, groups in self.groups.items() if role != self.sampler and own & set(groups)]


def seconds_of_iteration(given: Durations) -> float:
    """Seconds of an iteration in the steady state."""
    ends = simulate(_tasks(given))
    last = [max(end for name, end in ends.items() if name.startswith("update") and name.endswith(f" {k}"))
            for k in range(_ITERATIONS)]
    return last[-2] - last[-3]


def _tasks(given: Durations) -> Iterator[SimulatedTask]:
    sampler, beside = given.sampler, given.beside
    in_turn = sampler != "generator" or bool({"policy", "critic"} & set(beside))
    updated: tuple[str, ...] = ()
    if given.ahead:
        yield from _generate(given, 0, ())
    for k in range(_ITERATIONS):
        if not given.ahead:
            yield from _generate(given, k, updated)
        elif not beside and not in_turn:  # Sampling in a thread, from the start of the iteration.
            yield from _generate(given, k + 1, updated)
        ready = (f"generate {k}", *updated)
        scored = []
        for task in _scoring(given, k, ready):
            scored.append(task.name)
            yield task
        begun: tuple[str, ...] = ()
        if given.ahead and (beside or in_turn):  # In a thread after the scoring, or before the update.
            yield from _generate(given, k + 1, (*updated, *scored))
            begun = (f"generate {k + 1}",) if in_turn else ()
        updated = ()
        for role, phase, seconds in given.tasks:
            if phase == "update":
                yield SimulatedTask(f"update {role} {k}", given.groups[role], seconds, (*scored, *begun, f"generate {k}"))
                updated += (f"update {role} {k}",)


def _generate(given: Durations, k: int, after: tuple[str, ...]) -> Iterator[SimulatedTask]:
    move = given.moves.get(given.sampler, 0.0)
    if move:
        groups = tuple(dict.fromkeys(given.groups["policy"] + given.groups[given.sampler]))
        yield SimulatedTask(f"move {given.sampler} {k}", groups, move, after)
        after = (f"move {given.sampler} {k}",)
    seconds = sum(own for _, phase, own in given.tasks if phase == "generate")
    yield SimulatedTask(f"generate {k}", given.groups[given.sampler], seconds, after)


def _scoring(given: Durations, k: int, after: tuple[str, ...]) -> Iterator[SimulatedTask]:
    """The tasks that score. Values and log-probabilities start before the reward if they have no device in common with it."""
    reward = set(given.groups.get("reward", ()))
    passes = [(role, seconds) for role, phase, seconds in given.tasks if phase == "score"]
    late = [one for one in passes if one[0] != "reference" and reward & set(given.groups[one[0]])]
    rewards = [(role, seconds) for role, phase, seconds in given.tasks if phase == "reward"]
    for role, seconds in (*(one for one in passes if one not in late), *rewards, *late):
        own = after
        if role in given.moves:
            groups = tuple(dict.fromkeys(given.groups["critic"] + given.groups[role]))
            yield SimulatedTask(f"move {role} {k}", groups, given.moves[role], after)
            own = (*after, f"move {role} {k}")
        yield SimulatedTask(f"score {role} {k}", given.groups[role], seconds, own)
