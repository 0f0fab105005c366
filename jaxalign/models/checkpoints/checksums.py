"""Checksums of arrays, which a checkpoint stores and a restore verifies. They do not depend on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_SEEDS = (0x9E3779B9, 0x85EBCA6B)
_STRIDES = (0x01000193, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)  # Odd: every index gets another number.


def checksums(tree: Any) -> dict[str, str]:
    """Returns the checksum of every array of a pytree by its path, as 16 hexadecimal digits.

    Two sums modulo 2^32 over all elements, of a hash of the element's bits and its index. A sum depends neither on the order of
    the elements nor on the sharding, so it is the same on every mesh and in every process. A changed element always changes it.
    All processes must call this. Reads each array once, on its devices.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get([_sums(_on_device(x)) for _, x in leaves])
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): "".join(f"{int(value):08x}" for value in pair)
        for (path, _), pair in zip(leaves, sums, strict=True)
    }


def damaged_arrays(tree: Any, stored: Any) -> list[str]:
    """Returns the paths of the arrays whose checksum differs from the stored one, and of those that only one of the two has.

    stored: the result of `checksums` for the saved tree, or any other value if it was damaged.
    """
    computed = checksums(tree)
    stored = stored if isinstance(stored, dict) else {}
    return [name for name in sorted(computed.keys() | stored.keys()) if computed.get(name) != stored.get(name)]


def _on_device(x: Any) -> Any:
    """An array in the memory of its devices: offloaded arrays are in that of the host."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind is None:
        return x
    kind = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind))


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """uint32 [2]: the sums of the hashes of the elements, with two seeds."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(32, 8 * x.dtype.itemsize)}"))  # 64 bits give two words.
    index = jnp.uint32(0)
    for axis in range(words.ndim):
        stride = jnp.uint32(_STRIDES[axis % len(_STRIDES)])
        index = index + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    hashes = (_mix(_mix(index + jnp.uint32(seed)) ^ words.astype(jnp.uint32)) for seed in _SEEDS)
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in hashes])


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3, a bijection of 32-bit integers."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
