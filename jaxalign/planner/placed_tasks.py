"""The tasks of a stage with roles on devices of their own: each task on the mesh of the role that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.placement.plan import Placement
from jaxalign.planner.estimate import TaskEstimator
from jaxalign.planner.programs import Run, Task, estimated_tasks

MODELS = {"reward": "preference model", "generator": "policy", "value": "critic"}
"""The role of a model in the planner, by the role of a placement, where the names differ."""


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
