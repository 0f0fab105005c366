"""Meshes of roles on parts of the devices, and arrays that move from one mesh to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.plan import Placement


def role_shardings(placement: Placement, like: Sharding, devices: Sequence[jax.Device]) -> dict[str, Sharding]:
    """The mesh of each role with its rules. Roles with the same devices and axes have equal meshes.

    Args:
      placement: the devices and axes of each role.
      like: the sharding of the run's mesh, for the other options of the rules.
      devices: all devices, in the order of their numbers in the placement (`placement.machine.numbered`).
    """
    found = {}
    for name, role in placement.roles.items():
        mesh = make_mesh(**role.mesh, devices=devices[role.devices.start : role.devices.stop])
        parts = like.pipeline_micro_batches if role.mesh["pipeline"] > 1 else 1
        found[name] = dataclasses.replace(like, mesh=mesh, pipeline_micro_batches=parts)
    return found


def moved(tree: Any, sharding: Sharding) -> Any:
    """The arrays of a pytree on another mesh, split over the axes of the same names. Arrays that are already there are not
    copied."""

    def put(x: jax.Array) -> jax.Array:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.device_put(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(put, tree)


def rows_moved(tree: Any, sharding: Sharding) -> Any:
    """The arrays [B, ...] of a pytree on another mesh, with their rows split over its batch axes."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding.batch), tree)
