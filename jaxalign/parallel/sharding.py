"""Logical axes to mesh axes: one rules table, applied to parameters and activations alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A logical axis takes every mesh axis of its entry that an earlier axis of the same array has not taken. So `embed` of a
# weight is split over fsdp, while `embed` of an activation is not: its `batch` has fsdp already.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "expert": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "length": (),
    "head_dim": (),
    "layers": (),
    "norm": (),
    "rank": (),
}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh with its rules. Hashable, so it can be closed over by jitted functions."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...] = tuple(RULES.items())

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions have these logical names (None: not split)."""
        table, used, entries = dict(self.rules), set(), []
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
        return jax.lax.with_sharding_constraint(x, self.named(axes))

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
    def batch_size(self) -> int:
        """How many parts the batch is split into."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]
