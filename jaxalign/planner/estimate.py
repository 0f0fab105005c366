"""Estimates the memory, work and time of each task of a run on a cluster by arithmetic. Nothing is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh, AxisType

from jaxalign.config import Config
from jaxalign.config import Mesh as MeshConfig
from jaxalign.errors import UserError
from jaxalign.models.attention.fused import cudnn_refusal
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import AXES
from jaxalign.parallel.pipeline import bubble, micro_batches
from jaxalign.parallel.sharding import Sharding, keeps_gathered
from jaxalign.planner import judges, memory, weights, work
from jaxalign.planner.hardware import Cluster
from jaxalign.planner.network import bandwidths
from jaxalign.planner.programs import Run, Task, estimated_tasks
from jaxalign.planner.weights import WeightBytes
from jaxalign.planner.work import Work

if TYPE_CHECKING:
    from jaxalign.planner.placed_estimate import PlacedStage


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Fractions of the peak that programs reach: of matrix FLOP/s (mfu), memory bandwidth (hbm) and network bandwidth."""

    mfu: float = 0.5
    hbm: float = 0.8
    network: float = 0.8


@dataclasses.dataclass(frozen=True)
class TaskEstimate:
    """One task on one device.

    Attributes:
      task: the task.
      resident: bytes, by role, that stay on the device throughout the stage.
      temporary: bytes that the program adds, by kind.
      work: the work of one call.
      compute, memory, network: seconds of one call if only that resource limited it.
      seconds: seconds of one call: the sum over its steps of the largest of these three, where `network` is without `early`,
        plus `early` and `launch`.
      early: seconds of what is sent before anything is computed (`Work.early`), a part of `network`.
      launch: seconds that the kernels of sampling add on a GPU, however little they compute.
    """

    task: Task
    resident: dict[str, float]
    temporary: dict[str, float]
    work: Work
    compute: float
    memory: float
    network: float
    seconds: float
    launch: float = 0.0
    early: float = 0.0

    @property
    def peak(self) -> float:
        return sum(self.resident.values()) + sum(self.temporary.values())

    @property
    def bound(self) -> str:
        """The resource that limits the task most: "compute", "memory", "network", or "launch" of kernels."""
        return max(("compute", "memory", "network", "launch"), key=lambda name: getattr(self, name))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices."""
        return self.task.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """The estimates of all tasks of a run on a cluster.

    Attributes:
      config, cluster: the config and the devices.
      tasks: the tasks that run on config.mesh.
      placed: the stages with a placement, of which the tasks are not in `tasks`.
      others: devices of further kinds.
    """

    config: Config
    cluster: Cluster
    tasks: tuple[TaskEstimate, ...]
    placed: tuple[PlacedStage, ...] = ()
    others: tuple[Cluster, ...] = ()

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """All devices."""
        return (self.cluster, *self.others)

    @property
    def peak(self) -> float:
        """Bytes on the device that needs the most."""
        return max([*(task.peak for task in self.tasks), *(group.peak for stage in self.placed for group in stage.groups)])

    @property
    def fits(self) -> bool:
        return all(task.peak <= self.cluster.usable for task in self.tasks) and all(stage.fits for stage in self.placed)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names of the tasks with an unknown number of calls."""
        return tuple(task.task.name for task in self.tasks if task.task.calls is None)

    @property
    def seconds(self) -> float:
        """Seconds of all tasks with a known number of calls."""
        tasks = sum(task.seconds * task.task.calls for task in self.tasks if task.task.calls is not None)
        return tasks + sum(stage.seconds for stage in self.placed)


def abstract_sharding(mesh: MeshConfig) -> Sharding:
    """The sharding of config.mesh on an abstract mesh, without devices."""
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    return Sharding(
        AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES)), mesh.zero, mesh.sequence_parallel, mesh.generation,
        mesh.pipeline_micro_batches or mesh.pipeline, mesh.pipeline_repeats, keeps_gathered(mesh),
    )


def with_attention(policy: Model, cluster: Cluster) -> Model:
    """The model with the attention that the platform runs: "plain" if config.model.attention selects it or a GPU has no kernel
    for the model, else "fused". Raises UserError if the config requires a kernel that does not exist."""
    config = policy.config
    refusal = cudnn_refusal(config) if cluster.chip.kind == "gpu" else None
    if refusal is not None and config.attention == "fused":
        raise UserError(f"config.model.attention is 'fused', but {refusal}; set it to 'auto' or 'plain'")
    kind = "plain" if config.attention == "plain" or refusal is not None else "fused"
    return dataclasses.replace(policy, config=dataclasses.replace(config, attention=kind))


def check_divides(model: Model, mesh: MeshConfig) -> None:
    """Raises UserError if a mesh axis does not divide the model's heads, widths or layers."""
    config = model.config
    must = {
        "tensor": {"heads": config.heads, "kv_heads": config.kv_heads, "mlp": config.mlp, "rows of the vocabulary's tables":
                   config.table_rows},
        "fsdp": {"embed": config.embed},
        "pipeline": {"layers": config.layers},
    }
    if config.experts is not None:
        must["tensor"] = {"experts": config.experts.count, **{k: v for k, v in must["tensor"].items() if k != "mlp"}}
    for axis, sizes in must.items():
        ways = getattr(mesh, axis)
        for name, size in sizes.items():
            if size % ways:
                raise UserError(f"config.mesh.{axis} is {ways}; it must divide the model's {name} ({size})")


def estimate(
    config: Config, policy: Model, cluster: Cluster, assumptions: Assumptions = Assumptions(), prompt: int | None = None,
    examples: int | None = None, only: Collection[str] | None = None,
) -> RunEstimate:
    """The plan of a run with all roles on config.mesh; `placed_estimate` plans stages with a placement.

    Args:
      config: the run's config.
      policy: the run's model; its sharding is replaced by that of config.mesh.
      cluster: the devices.
      assumptions: the fractions of the peak that programs reach.
      prompt, examples: as in `programs.Run`.
      only: the stages to plan; None: all of config.stages.

    Raises:
      UserError: the mesh has more devices than the cluster or does not divide the model.
    """
    mesh = config.mesh
    sharding = abstract_sharding(mesh)
    if sharding.mesh.size > cluster.devices:
        raise UserError(f"config.mesh asks for {sharding.mesh.size} devices, but {cluster.name} has {cluster.devices}; "
                        "choose a smaller mesh, or let --search choose one")
    check_divides(policy, mesh)
    policy = dataclasses.replace(with_attention(policy, cluster), sharding=sharding)
    run = TaskEstimator(config, policy, cluster, assumptions)
    tasks = estimated_tasks(Run(config, policy, prompt, examples), only)
    trained = {task.stage: () for task in tasks}
    for task in tasks:
        trained[task.stage] += task.trains
        for role in task.stays:
            if role.startswith(judges.ROLE):
                check_divides(judges.judge_model(config, role, sharding)[0], mesh)
    return RunEstimate(config, cluster, tuple(run.of(task, trained[task.stage]) for task in tasks))


def optimizer_kind(config: Config, stage: str, role: str) -> str:
    """The kind of optimizer that trains a role in a stage."""
    section = getattr(config, stage)
    return section.critic_optimizer.kind if role == "critic" else section.optimizer.kind


def role_weights(config: Config, policy: Model, role: str) -> tuple[Model, WeightBytes]:
    """(the model of a role, the bytes of its weights). The model is a judge's own, or has the policy's architecture, with a
    scalar head for the critic and the preference model."""
    if role.startswith(judges.ROLE):
        model, _ = judges.judge_model(config, role, policy.sharding)
        return model, weights.measure(model, config.judge.weights, frozen=True)
    model = policy.with_head("scalar" if role in ("critic", "preference model") else "lm")
    return model, weights.measure(model, config.lora.base)


class TaskEstimator:
    """Estimates tasks on a mesh. policy: the run's model, on the abstract mesh of config.mesh. cluster: its devices."""

    def __init__(self, config: Config, policy: Model, cluster: Cluster, assumptions: Assumptions):
        self.config, self.policy, self.cluster, self.assume = config, policy, cluster, assumptions
        self.sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
        self.bandwidth = bandwidths(cluster, self.sizes, config.mesh.slices)

    @staticmethod
    def on_mesh(mesh: MeshConfig, model: Model) -> Model:
        """A model on the abstract mesh of config.mesh."""
        return dataclasses.replace(model, sharding=abstract_sharding(mesh))

    def resident(self, task: Task, trained: tuple[str, ...]) -> dict[str, float]:
        """Bytes by role; the base that adapters share counts once."""
        sizes = {}
        for role in task.stays:
            _, own = role_weights(self.config, self.policy, role)
            copies = self.config.preference.members if role == "preference model" and role not in trained else 1
            sizes[role] = own.parameters * copies
            if role == "labeller" and self.policy.lora is not None:
                sizes[role] = 0.0  # The labeller is the frozen base, which is counted once below.
            if role in trained:
                sizes[f"{role}'s optimizer"] = own.optimizer[optimizer_kind(self.config, task.stage, role)]
                if task.stage == "preference" and self.config.preference.early_stopping:
                    sizes[f"best {role}"] = own.parameters
        if self.policy.lora is not None:
            sizes["frozen base"] = role_weights(self.config, self.policy, "policy")[1].frozen
        return {role: size for role, size in sizes.items() if size}

    def weights(self, role: str) -> tuple[Model, WeightBytes]:
        """The role's model and its weights, with the copies that the devices make."""
        model, own = role_weights(self.config, self.policy, role)
        return model, own.on(self.cluster.chip.kind)

    def of(self, task: Task, trained: tuple[str, ...]) -> TaskEstimate:
        slices = self.config.mesh.slices
        models, gpu = [self.weights(role) for role in task.runs], self.cluster.chip.kind == "gpu"
        if task.phase in ("update", "checks"):
            kinds = [optimizer_kind(self.config, task.stage, role) for role in task.runs]
            parts, counts = self._update_memory(task, models), [task.steps]
            steps = [sum((work.update(*m, task, slices, kind) for m, kind in zip(models, kinds, strict=True)), Work())]
        elif task.phase == "generate":
            (model, own), = models
            usable = self.cluster.usable if gpu else None
            parts = memory.generation(model, own, task.rows, usable) | ({"weights to sample": own.moved} if own.moved else {})
            steps, counts = list(work.generate(model, own, task)), [1, 1, task.rows.new - 1]
        else:
            # Before the loop over rows, a TPU casts the kernels and gathers the tables of all models of the program.
            together = models if gpu else [*models, *map(self.weights, task.fused)]
            parts, counts = memory.scoring(together, task.rows, task.counted, gpu), [1]
            steps = [sum((work.forward(*m, task) for m in models), Work())]
        times = [self._seconds(step, task) for step in steps]
        whole = sum((step * count for step, count in zip(steps, counts, strict=True)), Work())
        each = [sum(time[i] * count for time, count in zip(times, counts, strict=True)) for i in range(3)]
        launch = work.launch_seconds(whole, self.cluster.chip.kind)
        early = [self._sent_seconds("fsdp", step.early) for step in steps]
        seconds = launch + sum(
            (first + max(compute, hbm, network - first)) * count
            for first, (compute, hbm, network), count in zip(early, times, counts, strict=True)
        )
        early_seconds = sum(first * count for first, count in zip(early, counts, strict=True))
        return TaskEstimate(task, self.resident(task, trained), parts, whole, *each, seconds, launch, early_seconds)

    def _update_memory(self, task: Task, models) -> memory.Parts:
        """The temporaries of the checks of step 0, or the largest among the models that a program updates one after another."""
        gpu = self.cluster.chip.kind == "gpu"
        if task.phase == "checks":
            return memory.checks(*models[0], task.rows, task.micro, gpu)
        candidates = []
        for place, (model, own) in enumerate(models):
            others = [other for i, (_, other) in enumerate(models) if i != place]
            beside = 0.0  # Models with adapters share the base, its casts and its tables.
            if model.lora is None:
                # A TPU gathers both tables, and sets both sums of gradients to zero, before the loops over micro-batches.
                kept, early = model.sharding.keep_gathered, task.packed and not gpu
                tables = [] if kept or not (early or task.micro > 1) else [other.table for other in others]
                casts = [] if kept else [other.casts for other in others]
                beside = sum(casts) + sum(tables) + (sum(other.gradients for other in others) if early else 0.0)
            lm_head = bool(task.counted) and model.head == "lm"
            candidates.append(memory.update(model, own, task.rows, task.micro, lm_head, beside, task.packed, gpu))
        return max(candidates, key=lambda parts: sum(parts.values()))

    def _seconds(self, step: Work, task: Task) -> tuple[float, float, float]:
        chip, assume = self.cluster.chip, self.assume
        compute = step.flops / (chip.flops(self.policy.config.compute_dtype) * assume.mfu)
        if task.phase == "update":
            sharding = self.policy.sharding
            parts = micro_batches(sharding, max(sharding.batch_size, task.rows.rows // task.micro))
            compute /= 1 - bubble(self.sizes["pipeline"], parts, sharding.pipeline_repeats)
        network = sum(self._sent_seconds(axis, size) for axis, size in step.sent.items())
        return compute, step.hbm / (chip.hbm * assume.hbm), network

    def _sent_seconds(self, axis: str, size: float) -> float:
        return size / (self.bandwidth[axis] * self.assume.network) if size and axis in self.bandwidth else 0.0
