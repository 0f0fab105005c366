"""Fills and reads device arrays block by block, so that the host never holds more than a few blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.models.checkpoints.layout import Bounds, CheckpointLayout

BLOCK_BYTES = 32 << 20
_read = jax.jit(jax.lax.dynamic_slice, static_argnums=2)
_write = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)

# Given bounds, yields the blocks within them as (start indices, values). Elements that no block covers are zero.
Blocks = Callable[[Bounds], Iterable[tuple[tuple[int, ...], np.ndarray]]]


def row_blocks(layout: CheckpointLayout, bounds: Bounds, itemsize: int) -> Iterator[Bounds]:
    """Splits bounds along the stored tensor's rows into parts of at most BLOCK_BYTES in the files (but at least one row)."""
    axis = layout.rows
    first, last = bounds[axis]
    width = itemsize * layout.parts
    for place, (start, stop) in enumerate(bounds):
        width *= 1 if place == axis else stop - start
    step = max(1, BLOCK_BYTES // max(1, width))
    for start in range(first, last, step):
        yield tuple((start, min(start + step, last)) if at == axis else both for at, both in enumerate(bounds))


def place_blocks(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, blocks: Blocks) -> jax.Array:
    """Builds an array of this shape and sharding from `blocks`. A part that several devices hold is read once."""
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
        # Not aliased: a buffer that numpy owns cannot be donated.
        return [jax.device_put(host, device, may_alias=False) for device in devices]
    parts = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for begin, block in blocks:
        block = np.ascontiguousarray(block)
        for at, device in enumerate(devices):
            # Wait for each write, so that blocks do not pile up.
            parts[at] = jax.block_until_ready(_write(parts[at], jax.device_put(block, device), np.asarray(begin, np.int32)))
    return parts


def fetch(leaf: jax.Array, bounds: Bounds) -> np.ndarray:
    """Copies the values within bounds to the host. If the array spans processes, all of them must make the same call."""
    sizes = tuple(stop - start for start, stop in bounds)
    if not leaf.is_fully_addressable:
        gather = _gathering(leaf.sharding, leaf.shape, sizes)
        return np.asarray(gather(leaf, np.asarray([start for start, _ in bounds], np.int32)))
    host = None
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        held = _bounds(shard.index, leaf.shape)
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, held, strict=True)]
        if any(start >= stop for start, stop in common):
            continue
        begin = np.asarray([start - origin for (start, _), (origin, _) in zip(common, held, strict=True)], np.int32)
        part = np.asarray(_read(shard.data, begin, tuple(stop - start for start, stop in common)))
        if part.shape == sizes:
            return part
        host = np.empty(sizes, leaf.dtype) if host is None else host
        host[tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(common, bounds, strict=True))] = part
    return host


@functools.lru_cache(maxsize=256)
def _gathering(sharding: jax.sharding.NamedSharding, shape: tuple[int, ...], sizes: tuple[int, ...]):
    """A jitted function (array, begin) -> its block of these sizes, replicated on every device. Axes of size 1 (such as one
    layer) are sliced on the devices that hold them, before anything is gathered."""
    alone = [size == 1 for size in sizes]
    single = tuple(1 if one else whole for one, whole in zip(alone, shape, strict=True))

    def take(leaf, begin):
        one = jax.lax.dynamic_slice(leaf, [begin[axis] * alone[axis] for axis in range(len(shape))], single)
        one = jax.lax.with_sharding_constraint(one, sharding)
        return jax.lax.dynamic_slice(one, [begin[axis] * (not alone[axis]) for axis in range(len(shape))], sizes)

    return jax.jit(take, out_shardings=jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))
