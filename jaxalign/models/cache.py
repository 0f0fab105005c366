"""The key/value cache for decoding, in floating point, or in int8 with a scale for each token and head.

A cache is a ring buffer: at each step all rows write to the same slot, which advances by one and wraps around after the last.
A row's tokens are therefore in the most recently written slots, and their number determines which slots the row sees.

Dimension letters: L layers, B rows, K key/value heads, h head dim, S slots, H query heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.plain import NEGATIVE
from jaxalign.models.layers import softcap


class Cache(NamedTuple):
    """Keys [L, B, K, h, S] and values [L, B, K, S, h] of some layers in `DecoderConfig.stored_dtype`. For int8 they are
    multiplied by the scales, float32 [L, B, K, S].

    The matrix products over the slots read both layouts directly. With the slots axis before the heads axis, a CPU would
    copy the whole cache at every step.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


Caches = tuple[Cache, ...]
"""One Cache for all layers, or one for each layer (`Model.layered`)."""
Tiers = tuple[Caches, ...]
"""One ring for the rows of each tier; with a single tier, for all rows. See `by_tier`."""

_SCALES = ("layers", "batch", "kv_heads", "length")
CACHE_AXES = Cache(
    ("layers", "batch", "kv_heads", "head_dim", "length"),
    ("layers", "batch", "kv_heads", "length", "head_dim"),
    _SCALES,
    _SCALES,
)
SLOT_AXES = Cache(*(axes.index("length") for axes in CACHE_AXES))
ROW_AXIS = 1


def cache_shapes(config: DecoderConfig, rows: int, slots: int, layers: int | None = None) -> Cache:
    """ShapeDtypeStructs of a cache for all layers, or for the given number of layers."""
    sizes = {
        "layers": config.layers if layers is None else layers, "batch": rows, "kv_heads": config.kv_heads,
        "head_dim": config.head_dim, "length": slots,
    }
    shapes = [tuple(sizes[axis] for axis in axes) for axes in CACHE_AXES]
    dtypes = [config.stored_dtype] * 2 + ["float32"] * 2
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return Cache(*arrays) if config.stored_dtype == "int8" else Cache(*arrays[:2])


def empty_rings(shapes: Caches | Tiers) -> Caches | Tiers:
    """Makes rings of zeros, all in one program.

    Args:
      shapes: ShapeDtypeStructs with shardings, as from `Model.abstract_cache`.
    """
    leaves, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(structure, _creation(*leaves)())


@functools.lru_cache(maxsize=64)
def _creation(*shapes: jax.ShapeDtypeStruct) -> Callable[[], list[jax.Array]]:
    """The program of `empty_rings`. A new function in each call would be traced and compiled again."""

    def zeros():
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]

    return jax.jit(zeros, out_shardings=[x.sharding for x in shapes])


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 values [..., h] and float32 scales [...] of x [..., h]: the largest magnitude of each vector becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    steps = x / jnp.where(scale == 0, 1, scale)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale


def stored(config: DecoderConfig, k_BxTxKxh: jax.Array, v_BxTxKxh: jax.Array) -> Cache:
    """Keys and values of one layer in the format of a cache without its first axis, one slot for each of the T tokens."""
    return restored(config, Cache(k_BxTxKxh.transpose(0, 2, 3, 1), v_BxTxKxh.transpose(0, 2, 1, 3)))


def restored(config: DecoderConfig, cache: Cache) -> Cache:
    """Keys and values in floating point, [L, ...] or of one layer, in the format of a cache."""
    if config.stored_dtype != "int8":
        return Cache(cache.keys.astype(config.stored_dtype), cache.values.astype(config.stored_dtype))
    (keys, key_scales), (values, value_scales) = quantise(cache.keys.swapaxes(-1, -2)), quantise(cache.values)
    return Cache(keys.swapaxes(-1, -2), values, key_scales, value_scales)


def joined(before: Cache, count_G, after: Cache) -> Cache:
    """Rows that continue prefixes: the first count[g] slots of a prefix, then the slots of the row.

    Args:
      before: floating-point keys and values of G prefixes in all layers.
      count_G: int32 [G], the number of tokens of each prefix.
      after: those of B rows, where rows [g * B / G, (g + 1) * B / G) continue prefix g.

    Returns:
      B rows with the slots of both.
    """
    each = after.values.shape[ROW_AXIS] // len(count_G)

    def one(prefix, rest, axis: int):
        room = [(0, rest.shape[axis]) if a == axis else (0, 0) for a in range(prefix.ndim)]
        whole = jnp.repeat(jnp.pad(prefix, room), each, axis=ROW_AXIS)
        # Without the axis of rows, which precedes that of slots.
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
        return jax.vmap(put, (ROW_AXIS, ROW_AXIS, 0), ROW_AXIS)(whole, rest, jnp.repeat(count_G, each))

    return Cache(*(x if x is None else one(x, y, axis) for x, y, axis in zip(before, after, SLOT_AXES, strict=True)))


def write(cache: Cache, layer, slot, token: Cache) -> Cache:
    """Writes one token per row, in the format of `stored`, at the given layer and slot, and returns the new cache. layer
    None: the cache has no layer axis."""
    written = []
    for whole, part, axis in zip(cache, token, SLOT_AXES, strict=True):
        if whole is None:
            written.append(None)
        elif layer is None:
            written.append(jax.lax.dynamic_update_slice_in_dim(whole, part, slot, axis - 1))
        else:
            begin = [0] * whole.ndim
            begin[0], begin[axis] = layer, slot
            written.append(jax.lax.dynamic_update_slice(whole, part[None], begin))
    return Cache(*written)


def by_tier(rows: Sequence[int], parts: int, x_Bx: jax.Array) -> list[jax.Array]:
    """Splits x [B, ...] into tiers; tier i has rows[i] rows. Each of the `parts` that the mesh splits rows into holds its share
    of every tier, in the order of the tiers."""
    if len(rows) == 1:
        return [x_Bx]
    own = x_Bx.reshape(parts, -1, *x_Bx.shape[1:])
    ends = [sum(rows[: i + 1]) // parts for i in range(len(rows))]
    return [own[:, end - n // parts : end].reshape(n, *x_Bx.shape[1:]) for n, end in zip(rows, ends, strict=True)]


def all_tiers(parts: int, tiers: Sequence[jax.Array]) -> jax.Array:
    """The inverse of `by_tier`."""
    if len(tiers) == 1:
        return tiers[0]
    own = jnp.concatenate([x.reshape(parts, -1, *x.shape[1:]) for x in tiers], axis=1)
    return own.reshape(-1, *own.shape[2:])


def attend_cache(
    q_Bx1xHxh, layer: Cache, mask_BxS, scale: float | None = None, cap: float | None = None
) -> jax.Array:
    """`attention.plain.attend` for one query per row over one layer of a cache (without its first axis). -> [B, 1, H, h]."""
    B, _, H, h = q_Bx1xHxh.shape
    K = layer.keys.shape[1]
    q = q_Bx1xHxh.reshape(B, K, H // K, h)
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, layer.keys.astype(q.dtype), preferred_element_type=jnp.float32)
    if layer.key_scales is not None:
        scores = scores * layer.key_scales[:, :, None, :]
    scores = softcap(scores * (h**-0.5 if scale is None else scale), cap)
    scores = jnp.where(mask_BxS[:, None, None, :], scores, NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1)
    if layer.value_scales is not None:
        weights = weights * layer.value_scales[:, :, None, :]
    values = layer.values.astype(q.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights.astype(q.dtype), values).reshape(B, 1, H, h)
