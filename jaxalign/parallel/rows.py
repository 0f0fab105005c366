"""Moves rows of arrays from the hosts to the devices and back, with any number of processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from jaxalign.parallel.sharding import Sharding


def place_rows(sharding: Sharding | None, rows: Any, index: np.ndarray | None = None) -> Any:
    """Places a record of numpy arrays [N, ...] on the devices, with the leading axis split over the mesh's batch axes.

    Each process copies only the rows of its own devices, so `rows` must be equal on all processes. index int [B]: the rows of
    the batch, in order; None for all rows. Without a mesh the batch stays on the host.
    """
    if sharding is None:
        return rows if index is None else jax.tree.map(lambda x: x[index], rows)

    def placed(x: np.ndarray) -> jax.Array:
        def part(window: tuple[slice, ...]) -> np.ndarray:
            return x[window] if index is None else x[index[window[0]]][:, *window[1:]]

        size = len(x) if index is None else len(index)
        return jax.make_array_from_callback((size, *x.shape[1:]), sharding.batch, part)

    return jax.tree.map(placed, rows)


def placed(tree: Any, like: Any = None) -> Any:
    """Commits every array of a pytree to a device; uncommitted arrays go to the device of `like`.

    Jitted steps return committed arrays, and JAX compiles separately for committed and uncommitted arguments. An uncommitted
    initial state would cause every step to be compiled twice.

    Args:
      tree: arrays or ShapeDtypeStructs. Committed arrays and structs with a sharding stay where they are.
      like: a pytree of arrays or structs; by default the tree itself.
    """
    device = SingleDeviceSharding(device_of(tree if like is None else like))

    def one(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf if leaf.sharding is not None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        return leaf if isinstance(leaf, jax.Array) and leaf.committed else jax.device_put(leaf, device)

    return jax.tree.map(one, tree)


def device_of(tree: Any) -> jax.Device:
    """Returns the single device to which an array of the pytree is committed; if there is none, `default_device`."""
    for leaf in jax.tree.leaves(tree):
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if isinstance(leaf, jax.Array) and leaf.committed:
            sharding = leaf.sharding
        if sharding is not None and len(sharding.device_set) == 1:
            return next(iter(sharding.device_set))
    return default_device()


def default_device() -> jax.Device:
    """Returns the device of `jax.default_device`, or the first one of this process."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def fetch(tree: Any) -> Any:
    """Gathers every array as numpy on every process; numpy arrays are returned unchanged."""
    if all(_is_here(leaf) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(lambda x: jax.device_get(x) if _is_here(x) else multihost_utils.process_allgather(x, tiled=True), tree)


def _is_here(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
