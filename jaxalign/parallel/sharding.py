"""Logical axes to mesh axes: one table of rules for each phase, applied to parameters and activations alike."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxalign.config import Mesh as MeshConfig
from jaxalign.errors import UserError
from jaxalign.parallel.mesh import make_mesh

# A logical axis takes every mesh axis of its entry that an earlier axis of the same array has not taken. So `embed` of a
# weight is split over fsdp, while `embed` of an activation is not: its `batch` has fsdp already.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "rows": ("data", "fsdp", "pipeline"),  # of final hidden states: with pipeline, heads share them out too
    "length": ("context",),
    "residual": ("context",),  # the length of what passes from layer to layer
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "expert": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "layers": ("pipeline",),
    "head_dim": (),
    "norm": (),
    "rank": (),
}
_SAMPLED = ("pipeline", "data", "fsdp", "context")
_GATHERED = {"embed": (), "layers": (), "length": (), "residual": ()}
# How weights lie, and over which axes rows are split, while tokens are sampled.
_GENERATION: dict[str, dict[str, tuple[str, ...]]] = {
    "tensor": _GATHERED | {"batch": _SAMPLED, "rows": _SAMPLED},
    "training": {"length": (), "residual": (), "batch": _SAMPLED, "rows": _SAMPLED},
    "whole": {name: () for name in RULES} | {"batch": (*_SAMPLED, "tensor"), "rows": (*_SAMPLED, "tensor")},
}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh with its rules. Hashable, so it can be closed over by jitted functions.

    zero: 3 splits parameters, gradients and optimizer state over fsdp, 2 the last two, 1 the optimizer state alone (ZeRO, arXiv
    1910.02054). sequence_parallel: what passes between layers is split over tensor too, along its length (arXiv 2205.05198).
    generation_rules: as `config.mesh.generation`. pipeline_micro_batches, pipeline_repeats: see `parallel/pipeline.py`.
    """

    mesh: Mesh
    zero: int = 3
    sequence_parallel: bool = False
    generation_rules: str = "tensor"
    pipeline_micro_batches: int = 1
    pipeline_repeats: int = 1
    phase: str = "training"

    @functools.cached_property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each logical axis in this phase."""
        table = dict(RULES)
        if self.sequence_parallel:
            table["residual"] = ("context", "tensor")
        if self.phase == "generation":
            return table | _GENERATION[self.generation_rules]
        split = {"training": 3, "gradients": 2, "optimizer": 1}[self.phase] <= self.zero
        return table if split else table | {"embed": ()}

    def _in(self, phase: str) -> Sharding:
        return dataclasses.replace(self, phase=phase)

    @property
    def generation(self) -> Sharding:
        """How weights, rows and caches lie while tokens are sampled."""
        return self._in("generation")

    @property
    def gradients(self) -> Sharding:
        """How gradients lie, for the names of their parameters."""
        return self._in("gradients")

    @property
    def optimizer(self) -> Sharding:
        """How the optimizer's moments lie, for the names of their parameters."""
        return self._in("optimizer")

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions have these logical names (None: not split)."""
        table, used, entries = self.rules, set(), []
        for axis in axes:
            if axis is not None and axis not in table:
                raise ValueError(f"logical axis {axis!r} has no rule; known: {sorted(table)}")
            free = tuple(m for m in table.get(axis, ()) if m not in used) if axis else ()
            used.update(free)
            entries.append(free or None)
        return PartitionSpec(*entries)

    def named(self, axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        # Inside a `shard_map` over some axes its own mesh is in force, which knows them as taken.
        around = jax.sharding.get_abstract_mesh()
        return jax.lax.with_sharding_constraint(x, NamedSharding(around if around.manual_axes else self.mesh, self.spec(axes)))

    def tree(self, axes_tree: Any) -> Any:
        """NamedShardings for a pytree of logical-axis tuples."""
        return jax.tree.map(self.named, axes_tree, is_leaf=lambda x: isinstance(x, tuple))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Leading dimension over all batch axes."""
        return self.named(("batch",))

    @property
    def length_multiple(self) -> int:
        """What the length of a row is padded to a multiple of, inside a model."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules["residual"])

    @property
    def batch_size(self) -> int:
        """How many parts the batch is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules["batch"])


def platform_of(sharding: Sharding | None) -> str:
    """"cpu", "gpu" or "tpu": where arrays lie that are sharded so, or, without a mesh, by default."""
    return jax.default_backend() if sharding is None else sharding.mesh.devices.flat[0].platform


def make_sharding(settings: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Sharding | None:
    """The mesh of `config.mesh` with its rules; None for one device, where there is nothing to place.

    devices: as in `make_mesh`. Raises UserError as it does, and where several processes run and the mesh leaves devices out.
    """
    mesh = make_mesh(
        settings.data, settings.fsdp, settings.tensor, settings.context, settings.pipeline, settings.slices, devices
    )
    if devices is None:
        _check_all_used(mesh)
        if mesh.size == 1:
            return None
    return Sharding(
        mesh, settings.zero, settings.sequence_parallel, settings.generation,
        settings.pipeline_micro_batches or settings.pipeline, settings.pipeline_repeats,
    )  # fmt: skip


def _check_all_used(mesh: Mesh) -> None:
    """Each process must have its part in every step."""
    processes, devices = jax.process_count(), jax.device_count()
    if processes > 1 and mesh.size != devices:
        raise UserError(f"the mesh takes {mesh.size} of the {devices} devices of {processes} processes; set the product of its "
                        "sizes to the number of all devices")
