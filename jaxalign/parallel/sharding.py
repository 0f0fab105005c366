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
from jaxalign.parallel.mesh import default_device, make_mesh

# A logical axis takes every mesh axis of its entry that an earlier axis of the same array has not taken. So `embed` of a
# weight is split over fsdp, while `embed` of an activation is not: its `batch` axis already uses fsdp.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "rows": ("data", "fsdp", "pipeline"),  # of final hidden states: heads also split them over pipeline
    "length": ("context",),
    "residual": ("context",),  # the length of activations between layers
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
# Sharding of weights and rows during sampling.
_GENERATION: dict[str, dict[str, tuple[str, ...]]] = {
    "tensor": _GATHERED | {"batch": _SAMPLED, "rows": _SAMPLED},
    "training": {"length": (), "residual": (), "batch": _SAMPLED, "rows": _SAMPLED},
    "whole": {name: () for name in RULES} | {"batch": (*_SAMPLED, "tensor"), "rows": (*_SAMPLED, "tensor")},
}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh with its rules. Hashable, so jitted functions can close over it.

    zero: 3 splits parameters, gradients and optimizer state over fsdp, 2 only gradients and optimizer state, 1 only the
    optimizer state (ZeRO, arXiv 1910.02054). sequence_parallel: activations between layers are also split over tensor, along
    their length (arXiv 2205.05198). generation_rules: see `config.mesh.generation`. pipeline_micro_batches, pipeline_repeats:
    see `parallel/pipeline.py`. keep_gathered: an update gathers parameters over fsdp once, for all its micro-batches.
    """

    mesh: Mesh
    zero: int = 3
    sequence_parallel: bool = False
    generation_rules: str = "tensor"
    pipeline_micro_batches: int = 1
    pipeline_repeats: int = 1
    keep_gathered: bool = False
    phase: str = "training"

    @functools.cached_property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes of each logical axis in this phase."""
        table = dict(RULES)
        if self.sequence_parallel:
            table["residual"] = ("context", "tensor")
        if self.phase == "generation":
            return table | _GENERATION[self.generation_rules]
        split = {"training": 3, "gradients": 2, "optimizer": 1}.get(self.phase, 4) <= self.zero
        return table if split else table | {"embed": ()}

    @property
    def generation(self) -> Sharding:
        """Returns the rules for weights, rows and caches during sampling."""
        return dataclasses.replace(self, phase="generation")

    @property
    def gathered(self) -> Sharding:
        """Returns the rules for parameters in use: those of training, but gathered over fsdp."""
        return dataclasses.replace(self, phase="gathered")

    @property
    def gradients(self) -> Sharding:
        """Returns the rules for gradients, by the axes of their parameters."""
        return dataclasses.replace(self, phase="gradients")

    @property
    def optimizer(self) -> Sharding:
        """Returns the rules for optimizer moments, by the axes of their parameters."""
        return dataclasses.replace(self, phase="optimizer")

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions have these logical names (None: not split)."""
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
        """Constrains the sharding of an array whose dimensions have these logical names."""
        if self.mesh.size == 1:  # A constraint has no effect there, but would keep XLA from fusing the operations around it.
            return x
        # Inside a `shard_map` over some axes, use the context mesh, in which these axes are manual.
        around = jax.sharding.get_abstract_mesh()
        return jax.lax.with_sharding_constraint(x, NamedSharding(around if around.manual_axes else self.mesh, self.spec(axes)))

    def constrain_tree(self, tree: Any, axes_tree: Any) -> Any:
        """Applies `constrain` to each array of a pytree; axes_tree has a tuple of logical names for each."""
        return jax.tree.map(lambda axes, x: self.constrain(x, axes), axes_tree, tree, is_leaf=_is_axes)

    def tree(self, axes_tree: Any) -> Any:
        """Returns NamedShardings for a pytree of logical-axis tuples."""
        return jax.tree.map(self.named, axes_tree, is_leaf=_is_axes)

    @property
    def platform(self) -> str:
        """Returns the platform of the mesh: "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def nvidia(self) -> bool:
        """Returns whether the mesh is of NVIDIA GPUs, attached ones or those of a topology."""
        version, kind = self.device.client.platform_version, self.device.device_kind
        return self.platform == "gpu" and ("cuda" in version or "NVIDIA" in kind)

    @property
    def device(self) -> jax.Device:
        """Returns the first device of the mesh; all are of one kind."""
        return self.mesh.devices.flat[0]

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Returns the sharding of the leading dimension over all batch axes."""
        return self.named(("batch",))

    @property
    def length_multiple(self) -> int:
        """Rows inside a model are padded to a multiple of this length."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules["residual"])

    @property
    def batch_size(self) -> int:
        """Returns the number of parts into which the batch is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules["batch"])


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple)


def one_device(device: jax.Device | None = None) -> Sharding:
    """Returns a mesh of one device: the given one, or `default_device`."""
    return Sharding(make_mesh(devices=[device or default_device()]))


def make_sharding(settings: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Sharding:
    """Returns the mesh of `config.mesh` with its rules.

    devices: as in `make_mesh`. Raises UserError as `make_mesh` does, and if the mesh omits devices of a run of several
    processes.
    """
    mesh = make_mesh(
        settings.data, settings.fsdp, settings.tensor, settings.context, settings.pipeline, settings.slices, devices
    )
    if devices is None:
        processes, available = jax.process_count(), jax.device_count()
        if processes > 1 and mesh.size != available:  # Each process must take part in every step.
            raise UserError(f"the mesh uses {mesh.size} of the {available} devices of {processes} processes; choose sizes "
                            "whose product is the number of all devices")
    return Sharding(
        mesh, settings.zero, settings.sequence_parallel, settings.generation,
        settings.pipeline_micro_batches or settings.pipeline, settings.pipeline_repeats, keeps_gathered(settings),
    )


def keeps_gathered(settings: MeshConfig) -> bool:
    """Whether updates gather parameters once for all micro-batches, because fsdp splits them and the config says so."""
    return settings.keep_gathered == "always" and settings.fsdp > 1 and settings.zero == 3
