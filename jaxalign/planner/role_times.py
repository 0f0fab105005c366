"""The time and the memory of one role of reinforcement learning on a part of the devices, with a mesh of its own.

FLOPs and bytes come from `work`, `memory` and `weights`. Assumptions, besides those of `estimate`:

- A step takes the largest of its times for arithmetic, memory and network. If the execution model does not overlap
  exchange and computation, the time for the network is added instead.
- A collective takes the latency of its ring (`Latency`) besides its bytes, so that a collective over more devices takes longer.
- A task that does not fit runs in parts: an update in micro-batches, scoring in parts of the batch, generation in rounds.
- All responses have the length of the workload. Decoding reads a KV cache with slots for the whole row in every step.
- A pipeline idles as in an update (`parallel.pipeline.bubble`) when it scores.
- Weights that move between meshes are limited by the slowest link on their way, and nothing runs meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jaxalign.models.model import Model
from jaxalign.parallel.pipeline import bubble
from jaxalign.placement import meshes
from jaxalign.planner import memory, work
from jaxalign.planner.hardware import Chip, Cluster
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.network import bandwidths
from jaxalign.planner.programs import Task
from jaxalign.planner.role_models import (
    GENERATION,
    SCORING,
    TRAINING,
    ExecutionModel,
    RoleModel,
    Workload,
    inference_mesh,
    part_of,
    placed,
    role_meshes,
)
from jaxalign.planner.weights import WeightBytes
from jaxalign.planner.work import Work


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds of a collective besides its bytes: `launch`, and one `near` or `far` for each step of its ring.

    A ring over n devices takes n - 1 steps to gather and 2 (n - 1) to reduce and gather. A step is far if the mesh axis spans
    hosts of GPUs.
    """

    launch: float
    near: float
    far: float


_LATENCY = {"gpu": (Latency(8.4e-6, 3.4e-6, 14e-6), Latency(6.6e-6, 0.6e-6, 2.7e-6)),
            "tpu": (Latency(0.0, 1e-6, 1e-6),) * 2}
"""By kind of chip, for long messages and for those of a decode step. GPUs: the ring algorithm of NCCL 2.19,
src/graph/tuning.cc, protocols Simple and LL. TPUs: about 1 microsecond a hop ("How to Scale Your Model", chapter on TPUs)."""


@dataclasses.dataclass(frozen=True)
class TaskVariant:
    """One way to run a task.

    Attributes:
      seconds: seconds in an iteration, without the move of weights.
      temporary: bytes on a device besides the resident weights.
      bound: the resource that takes the longest: "compute", "memory", "network" or "launch" (of kernels).
      parts: micro-batches of an optimizer step, parts of a scored batch, or rounds of generation.
      tensor: the tensor axis of generation; 0 for other tasks.
      moved: seconds to move the weights from the mesh of training to that of generation.
    """

    seconds: float
    temporary: float
    bound: str
    parts: int
    tensor: int = 0
    moved: float = 0.0


@dataclasses.dataclass(frozen=True)
class RoleTimes:
    """A role with a mesh on a number of devices.

    Attributes:
      role: the role.
      mesh: the size of each mesh axis.
      resident: bytes on a device during the whole iteration: weights, and the optimizer state of a trained role.
      tasks: by phase in which the role runs, the variants of its task, fastest first.
    """

    role: str
    mesh: Mapping[str, int]
    resident: float
    tasks: Mapping[str, tuple[TaskVariant, ...]]

    def fastest(self, phase: str, free: float) -> TaskVariant | None:
        """The fastest variant of a task that fits into `free` bytes besides all resident ones; None if none does."""
        return next((one for one in self.tasks[phase] if one.temporary <= free), None)

    def fits(self, usable: float) -> bool:
        """Whether the role fits into `usable` bytes of each device without other roles."""
        return all(self.fastest(phase, usable - self.resident) for phase in self.tasks)


def role_times(
    role: RoleModel, mesh: Mapping[str, int], cluster: Cluster, workload: Workload, engine: ExecutionModel,
    shadowed: bool = False,
) -> RoleTimes | None:
    """The tasks of a role on all devices of a cluster; None if the batch does not divide over the mesh.

    Args:
      role: the role with its model.
      mesh: the sizes of all mesh axes; their product is the number of devices.
      cluster: the devices.
      workload: the rows of an iteration.
      engine: how programs run.
      shadowed: whether a generator samples for the policy, or a value role computes values for the critic.
    """
    copies = mesh["data"] * mesh["fsdp"]
    if not workload.padded and (workload.batch % copies or (role.trained and workload.batch // workload.minibatches % copies)):
        return None
    model, own = placed(role, mesh, cluster, engine)
    resident = own.parameters + own.frozen + (own.optimizer[role.optimizer] if role.trained else 0.0)
    makers = {GENERATION: _generation, SCORING: _scoring, TRAINING: _update}
    one = _Placed(role, model, own, cluster, engine, workload)
    tasks = {phase: tuple(sorted(makers[phase](one), key=lambda variant: (variant.seconds + variant.moved, variant.temporary)))
             for phase in role.phases(workload, shadowed)}
    return RoleTimes(role.role, mesh, resident, tasks) if all(tasks.values()) else None


def transfer_seconds(shadow: RoleModel, shards: int, source: Cluster, target: Cluster, engine: ExecutionModel) -> float:
    """Seconds to send the weights of a trained role to its shadow on other devices.

    All sources send one copy together. Every target receives its shard, which the copies pass on in a ring. Devices of one host
    use its links, others the network between hosts.

    Args:
      shadow: the role that receives the weights.
      shards: the parts into which the target splits a copy of the weights.
      source, target: the devices of the trained role and of its shadow.
      engine: how programs run.
    """
    size = placed(shadow, meshes.complete({}), target, engine)[1].generation
    near = source.chip == target.chip and source.devices + target.devices <= source.chip.linked
    return moving_seconds(size, shards, source, target, near) / engine.fractions.network


def moving_seconds(size: float, shards: int, source: Cluster, target: Cluster, near: bool) -> float:
    """Seconds to send one copy of `size` bytes as in `transfer_seconds`, at the full bandwidth of the network. near: whether
    the links of the devices connect source and target."""
    sent, received = (part.chip.link if near or part.far is None else part.far for part in (source, target))
    return max(size / source.devices / sent, size / shards / received)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A role's model on its mesh."""

    role: RoleModel
    model: Model
    own: WeightBytes
    cluster: Cluster
    engine: ExecutionModel
    workload: Workload

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.model.sharding.mesh.shape

    @property
    def gpu(self) -> bool:
        return self.cluster.chip.kind == "gpu"

    def rows(self, count: float) -> int:
        """Rows of a call with at least `count` of them, filled up to the same number on every copy of the weights."""
        copies = self.mesh["data"] * self.mesh["fsdp"]
        return math.ceil(count / copies) * copies

    def seconds(self, step: Work, counts: Mapping[str, tuple[int, int]], idle: float = 0.0, small: bool = False) -> _Seconds:
        """Seconds of a step. counts: by mesh axis, (gathers, reductions); idle: the share that a pipeline idles."""
        chip, fractions = self.cluster.chip, self.engine.fractions
        speeds, latency = bandwidths(self.cluster, dict(self.mesh)), _LATENCY[chip.kind][small]
        network = 0.0
        for axis, speed in speeds.items():
            gathers, reductions = counts.get(axis, (0, 0))
            hop = latency.far if chip.kind == "gpu" and speed != chip.link else latency.near
            ring = (self.mesh[axis] - 1) * hop
            network += step.sent.get(axis, 0.0) / (speed * fractions.network)
            network += gathers * (latency.launch + ring) + reductions * (latency.launch + 2 * ring)
        compute = step.flops / (chip.flops(self.model.config.compute_dtype) * fractions.mfu) / (1 - idle)
        launch = work.launch_seconds(step, chip.kind)
        return _Seconds(compute, step.hbm / (chip.hbm * fractions.hbm), network, launch, self.engine.overlapped)


@dataclasses.dataclass(frozen=True)
class _Seconds:
    """Seconds of a step if only one resource limited it; `launch` as in `TaskEstimate`, `overlapped` as in `ExecutionModel`."""

    compute: float
    memory: float
    network: float
    launch: float
    overlapped: bool

    @property
    def whole(self) -> float:
        """Seconds of the step."""
        device = max(self.compute, self.memory)
        return self.launch + (max(device, self.network) if self.overlapped else device + self.network)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "network", "launch"), key=lambda name: getattr(self, name))


def _update(one: _Placed) -> Iterator[TaskVariant]:
    """An optimizer step in 1, 2, 4 ... micro-batches, times the steps of an iteration."""
    workload, mesh, layers = one.workload, one.mesh, one.model.config.layers // one.mesh["pipeline"]
    rows = one.rows(workload.batch / workload.minibatches)
    counted = workload.new if one.model.head == "lm" else 0
    each = rows // (mesh["data"] * mesh["fsdp"])
    passes = 3 if one.model.config.remat else 2
    for parts in _powers(each):
        task = Task("ppo", "update", (one.role.role,), BatchShape(rows, workload.prompt + workload.new), counted=counted,
                    micro=parts)
        step = work.update(one.model, one.own, task, 1, one.role.optimizer)
        turns = math.gcd(each // parts, one.model.sharding.pipeline_micro_batches)
        reductions = layers * parts
        if one.engine.local_gradients and "data" in step.sent:
            step = dataclasses.replace(step, sent={**step.sent, "data": step.sent["data"] / parts})
        counts = {"tensor": (0, 2 * passes * layers * parts * turns), "fsdp": (passes * layers * parts, layers * parts),
                  "data": (0, layers if one.engine.local_gradients else reductions), "pipeline": (2 * turns * parts, 0)}
        seconds = one.seconds(step, counts, bubble(mesh["pipeline"], turns))
        parts_of = memory.update(one.model, one.own, task.rows, parts, bool(counted), gpu=one.gpu)
        steps = workload.minibatches * workload.epochs
        yield TaskVariant(steps * seconds.whole, sum(parts_of.values()), seconds.bound, parts)


def _scoring(one: _Placed) -> Iterator[TaskVariant]:
    """A forward pass over the batch in 1, 2, 4 ... parts."""
    workload, mesh, layers = one.workload, one.mesh, one.model.config.layers // one.mesh["pipeline"]
    counted = workload.new if one.model.head == "lm" else 0
    for parts in _powers(one.rows(workload.batch) // (mesh["data"] * mesh["fsdp"])):
        shape = BatchShape(one.rows(workload.batch / parts), workload.prompt + workload.new)
        task = Task("ppo", "score", (one.role.role,), shape, counted=counted)
        turns = math.gcd(shape.rows // (mesh["data"] * mesh["fsdp"]), one.model.sharding.pipeline_micro_batches)
        counts = {"tensor": (0, 2 * layers * turns), "fsdp": (layers, 0), "pipeline": (turns, 0)}
        step = work.forward(one.model, one.own, task)
        seconds = one.seconds(step, counts, bubble(mesh["pipeline"], turns))
        temporary = memory.scoring([(one.model, one.own)], shape, counted, one.gpu)
        yield TaskVariant(parts * seconds.whole, sum(temporary.values()), seconds.bound, parts)


def _generation(one: _Placed) -> Iterator[TaskVariant]:
    """Prefill and decoding in one or more rounds, with each possible tensor axis."""
    for tensor in _tensors(one):
        own, variants = _decoding(one.role, one.cluster, one.workload, one.engine, tensor)
        moved = _resharding(one, own, tensor) if one.role.trained else 0.0
        yield from (dataclasses.replace(variant, moved=moved) for variant in variants) if moved else variants


@functools.lru_cache(maxsize=4096)
def _decoding(role: RoleModel, cluster: Cluster, workload: Workload, engine: ExecutionModel,
              tensor: int) -> tuple[WeightBytes, tuple[TaskVariant, ...]]:
    """(the weights for generation on a device, the variants of generation), which do not depend on the mesh of training."""
    model, own = placed(role, inference_mesh(cluster.devices, tensor), cluster, engine)
    here = _Placed(role, model, own, cluster, engine, workload)
    copies, variants = cluster.devices // tensor, []
    if not workload.padded and workload.batch % copies:
        return own, ()
    for rounds in _parts(here.rows(workload.batch) // copies):
        shape = BatchShape(here.rows(workload.batch / rounds), workload.prompt, workload.new)
        _, prefill, step = work.generate(model, own, Task("ppo", "generate", (role.role,), shape, counted=1))
        counts = {"tensor": (1, 2 * model.config.layers)}
        first, each = here.seconds(prefill, counts), here.seconds(step, counts, small=True)
        seconds = rounds * (first.whole + (workload.new - 1) * each.whole)
        parts = memory.generation(model, own, shape, cluster.usable if here.gpu else None)
        # A policy keeps the weights of training besides those of generation.
        temporary = (own.generation if role.trained else 0.0) + sum(parts.values())
        variants.append(TaskVariant(seconds, temporary, each.bound, rounds, tensor))
    return own, tuple(variants)


def _tensors(one: _Placed) -> list[int]:
    """The tensor axes for generation."""
    if not one.role.trained or not one.engine.resharded:
        return [one.mesh["tensor"]]
    return [mesh["tensor"] for mesh in role_meshes(dataclasses.replace(one.role, role="generator"), one.cluster, one.engine)]


def _resharding(one: _Placed, own: WeightBytes, tensor: int) -> float:
    """Seconds in which each device gets the weights that it needs to generate and lacks.

    A device has 1/(t p f) of the weights for training and needs 1/t_g, of which it lacks (t p f - t_g) / (t_g t p f) (arXiv
    2409.19256, table of transition overheads, with one shard of generation in each shard of training).
    """
    held = one.mesh["tensor"] * one.mesh["pipeline"] * one.mesh["fsdp"]
    chip = one.cluster.chip
    near = chip.kind == "tpu" or held <= chip.linked or one.cluster.far is None
    lacking = own.generation * max(0.0, 1 - tensor / held)
    return lacking / ((chip.link if near else one.cluster.far) * one.engine.fractions.network)


def _parts(most: int) -> list[int]:
    """Numbers of parts to try, up to `most`: 1 to 8, then those times powers of two."""
    tried = {factor << power for factor in range(1, 9) for power in range(max(1, most).bit_length())}
    return sorted(parts for parts in tried if parts <= most)


def _powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


@functools.lru_cache(maxsize=4096)
def role_options(role: RoleModel, chip: Chip, count: int, workload: Workload, engine: ExecutionModel,
                 shadowed: bool = False) -> tuple[RoleTimes, ...]:
    """A role's times with every mesh of `count` chips with which it fits alone."""
    cluster = part_of(chip, count)
    every = (role_times(role, mesh, cluster, workload, engine, shadowed) for mesh in role_meshes(role, cluster, engine))
    return tuple(one for one in every if one is not None and one.fits(cluster.usable))
