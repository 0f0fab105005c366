"""Arrays on devices, filled and read block by block: the host never holds more of them than a few blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.models.layout import Bounds

BLOCK_BYTES = 32 << 20

# (where it begins, the block) of each block within bounds; what none covers is zero.
Blocks = Callable[[Bounds], Iterable[tuple[tuple[int, ...], np.ndarray]]]


def place_blocks(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, blocks: Blocks) -> jax.Array:
    """An array [shape] sharded so, of which `blocks` gives any part. What several devices hold alike is asked for once."""
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_bounds(index, shape), []).append(device)
    parts = []
    for bounds, devices in holders.items():
        parts += _fill(tuple(stop - start for start, stop in bounds), dtype, devices, blocks(bounds))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _fill(shape, dtype: np.dtype, devices: list[jax.Device], blocks) -> list[jax.Array]:
    if math.prod(shape) * dtype.itemsize <= BLOCK_BYTES:
        host = np.zeros(shape, dtype)
        for begin, block in blocks:
            host[tuple(slice(start, start + size) for start, size in zip(begin, block.shape, strict=True))] = block
        # Not aliased: a buffer that is numpy's could not be donated.
        return [jax.device_put(host, device, may_alias=False) for device in devices]
    parts = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for begin, block in blocks:
        block = np.ascontiguousarray(block)
        for at, device in enumerate(devices):
            # Waited for, so that blocks do not pile up.
            parts[at] = jax.block_until_ready(_write(parts[at], jax.device_put(block, device), np.asarray(begin, np.int32)))
    return parts


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, block: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, block, [begin[axis] for axis in range(whole.ndim)])
