"""Moves rows of arrays from the hosts to the devices and back, with any number of processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxalign.parallel.sharding import Sharding


def place_rows(sharding: Sharding, rows: Any, index: np.ndarray | None = None) -> Any:
    """Places a record of numpy arrays [N, ...] on the devices, with the leading axis split over the mesh's batch axes.

    Each process copies only the rows of its own devices, so `rows` must be equal on all processes. index int [B]: the rows of
    the batch, in order; None for all rows.
    """

    def placed(x: np.ndarray) -> jax.Array:
        def part(window: tuple[slice, ...]) -> np.ndarray:
            return x[window] if index is None else x[index[window[0]]][:, *window[1:]]

        size = len(x) if index is None else len(index)
        return jax.make_array_from_callback((size, *x.shape[1:]), sharding.batch, part)

    return jax.tree.map(placed, rows)


def committed(sharding: Sharding, tree: Any) -> Any:
    """Replicates over the mesh every array of a pytree that is not committed to a device; returns the tree itself if all are.

    JAX compiles separately for committed and uncommitted arguments, and results are committed. An uncommitted initial state
    would cause every step to be compiled twice.
    """

    def is_committed(leaf: Any) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed)

    if all(map(is_committed, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(lambda x: x if is_committed(x) else jax.device_put(x, sharding.replicated), tree)


def fetch(tree: Any) -> Any:
    """Gathers every array as numpy on every process; numpy arrays are returned unchanged."""
    if all(_is_here(leaf) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(lambda x: jax.device_get(x) if _is_here(x) else multihost_utils.process_allgather(x, tiled=True), tree)


def _is_here(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
