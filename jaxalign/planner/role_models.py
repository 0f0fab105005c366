"""The models, the rows and how programs run that a search for placements plans for, and the meshes that a role may have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jaxalign.config import Mesh as MeshConfig
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.placement import meshes
from jaxalign.placement.roles import role_of
from jaxalign.planner import weights
from jaxalign.planner.estimate import Assumptions, abstract_sharding, check_divides, with_attention
from jaxalign.planner.hardware import Chip, Cluster
from jaxalign.planner.weights import WeightBytes

GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
PHASES = (GENERATION, SCORING, TRAINING)
"""The phases of an iteration, in order."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The rows of one iteration.

    Attributes:
      prompt, new: tokens of a prompt and of a response.
      batch: responses of an iteration.
      minibatches, epochs: optimizer steps per epoch, and epochs over the batch.
      policy_scores: whether the policy computes its log-probabilities again in the scoring phase.
      values_in_update: whether the update computes the critic's values, if the critic shares the policy's mesh. The search
        counts the pass that computes them; `placement_parts` leaves it out for such placements.
      padded: whether a batch that does not divide over a mesh is filled up with empty rows; if not, such a mesh is not used.
    """

    prompt: int
    new: int
    batch: int
    minibatches: int = 1
    epochs: int = 1
    policy_scores: bool = False
    values_in_update: bool = False
    padded: bool = False


@dataclasses.dataclass(frozen=True)
class RoleModel:
    """The model of a role.

    Attributes:
      role: the role, as in `placement.roles`.
      model: the model; its sharding is not used.
      stored: the format of the weights of a role that is not trained: "float32", "bfloat16", "int8" or "nf4".
      optimizer: the kind of the optimizer.
    """

    role: str
    model: Model
    stored: str = "bfloat16"
    optimizer: str = "adamw"

    @property
    def trained(self) -> bool:
        return role_of(self.role).trained

    def phases(self, workload: Workload, shadowed: bool = False) -> tuple[str, ...]:
        """The phases in which the role runs. shadowed: whether a generator samples, or a value role computes the values."""
        name = role_of(self.role).name
        if name == "policy":
            return (() if shadowed else (GENERATION,)) + ((SCORING,) if workload.policy_scores else ()) + (TRAINING,)
        if name == "critic":
            return (() if shadowed else (SCORING,)) + (TRAINING,)
        return (GENERATION,) if name == "generator" else (SCORING,)


@dataclasses.dataclass(frozen=True)
class ExecutionModel:
    """How programs run, the same for every role and placement.

    Attributes:
      fractions: the fractions of the peak that programs reach.
      axes: the mesh axes that may be above 1.
      zero, sequence_parallel: as in config.mesh.
      local_gradients: whether the copies on axis data add up the gradients of their micro-batches and exchange the sum once in
        an optimizer step, as Megatron-LM does; otherwise each micro-batch's are exchanged, as in this project's update.
      resharded: whether generation may use another mesh than training on the same devices; otherwise the tensor axis is kept,
        as with config.mesh.generation "tensor".
      overlapped: whether devices compute while they exchange data, as in `estimate`; if not, both times add up.
    """

    fractions: Assumptions = Assumptions()
    axes: tuple[str, ...] = ("data", "fsdp", "tensor")
    zero: int = 3
    sequence_parallel: bool = False
    local_gradients: bool = False
    resharded: bool = False
    overlapped: bool = True


def part_of(chip: Chip, count: int) -> Cluster:
    """A part of a machine: `count` chips of one kind. A part of TPUs has the shape nearest to a cube."""
    if chip.kind == "gpu":
        return Cluster(chip, (count,), 1, chip.usable)
    shape, left = [1] * chip.torus_axes, count
    while left > 1:
        factor = next(n for n in range(2, left + 1) if left % n == 0)
        shape[shape.index(min(shape))] *= factor
        left //= factor
    return Cluster(chip, tuple(sorted(shape)), 1, chip.usable)


def role_meshes(role: RoleModel, cluster: Cluster, engine: ExecutionModel) -> Iterator[dict[str, int]]:
    """Meshes of all devices of a cluster that divide the role's model.

    tensor stays within a host of GPUs. fsdp is 1, or all copies of the weights, or those within a host: sizes in between save
    less memory than the former and send as much as the latter. A generator has data and tensor only.
    """
    axes = meshes.INFERENCE_AXES if role_of(role.role).name == "generator" else engine.axes
    host = cluster.chip.chips_per_host
    for mesh in meshes.meshes(cluster.devices, axes):
        tensor, fsdp, copies = mesh["tensor"], mesh["fsdp"], mesh["data"] * mesh["fsdp"]
        if (cluster.chip.kind == "gpu" and host % tensor) or fsdp not in (1, copies, host // math.gcd(host, tensor)):
            continue
        try:
            check_divides(role.model, _mesh_config(mesh, engine))
        except UserError:
            continue
        yield mesh


def inference_mesh(count: int, tensor: int) -> dict[str, int]:
    """The mesh for inference of which each copy of the weights has `tensor` devices."""
    return meshes.complete({"data": count // tensor, "tensor": tensor})


def _mesh_config(mesh: Mapping[str, int], engine: ExecutionModel) -> MeshConfig:
    turns = {"pipeline_micro_batches": 4 * mesh["pipeline"]} if mesh["pipeline"] > 1 else {}
    return MeshConfig(**mesh, **({"zero": engine.zero} if mesh["fsdp"] > 1 else {}),
                      **({"sequence_parallel": engine.sequence_parallel} if mesh["tensor"] > 1 else {}), **turns)


def placed(role: RoleModel, mesh: Mapping[str, int], cluster: Cluster, engine: ExecutionModel) -> tuple[Model, WeightBytes]:
    """(the model on the mesh, the bytes of its weights on a device)."""
    model = with_attention(role.model, cluster)
    if not role.trained:
        model = dataclasses.replace(model, lora=None)
    # Copies on axis data have equal weights, so one measurement serves all sizes of it.
    alone = dataclasses.replace(model, sharding=_sharding(_mesh_config({**mesh, "data": 1}, engine)))
    own = weights.measure(alone, role.stored, frozen=not role.trained)
    return dataclasses.replace(model, sharding=_sharding(_mesh_config(mesh, engine))), own.on(cluster.chip.kind)


_sharding = functools.lru_cache(maxsize=4096)(abstract_sharding)
