"""Checksums of arrays, which a checkpoint stores and a restore verifies. They do not depend on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SEEDS = (0x9E3779B9, 0x85EBCA6B)
_STRIDES = (0x01000193, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)  # Odd: every index gets another number.
_HOST_BYTES = 1 << 20
"""Arrays up to this size are hashed on the host: compiling a program for their shape would take longer than that."""


def checksums(tree: Any) -> dict[str, str]:
    """Returns the checksum of every array of a pytree by its path, as 16 hexadecimal digits.

    Two sums modulo 2^32 over all elements, of a hash of the element's bits and its index. A sum depends neither on the order of
    the elements nor on the sharding, so it is the same on every mesh and in every process. A changed element always changes it.
    All processes must call this. Reads each array once: a large one on its devices, a small one of this process on the host.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = jax.device_get([_numbers(x) if _is_small(x) else _sums(_on_device(x)) for _, x in leaves])
    sums = [_host_sums(x) if _is_small(leaf) else x for x, (_, leaf) in zip(found, leaves, strict=True)]
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


def _is_small(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_fully_addressable and x.size * x.dtype.itemsize <= _HOST_BYTES


def _numbers(x: jax.Array) -> jax.Array:
    """The array itself, or the words of a PRNG key."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """uint32 [2]: the sums of the hashes of the elements, with two seeds."""
    x = _numbers(x)
    if x.dtype in (jnp.bool_, jnp.uint4):  # Of less than a byte, such as the numbers of a base in nf4.
        x = x.astype(jnp.uint8)
    # 64 bits give two words.
    return _sums_of(jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(32, 8 * x.dtype.itemsize)}")), jnp)


def _host_sums(x: np.ndarray) -> np.ndarray:
    """The same sums, computed by numpy."""
    words = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes a scalar a vector.
    if x.dtype.itemsize == 8:
        words = words.reshape(*x.shape, 1).view(np.uint32)
    with np.errstate(over="ignore"):
        return _sums_of(words.view(f"uint{min(32, 8 * x.dtype.itemsize)}"), np)


def _sums_of(words: Any, module: Any) -> Any:
    """The sums of the hashes of unsigned integers. module: jax.numpy or numpy, of whose arrays `words` is one."""
    index = module.uint32(0)
    for axis, size in enumerate(words.shape):
        stride = np.uint32(_STRIDES[axis % len(_STRIDES)])
        along = module.arange(size, dtype=module.uint32) * stride
        index = index + along.reshape([size if other == axis else 1 for other in range(words.ndim)])
    hashes = (_mix(_mix(index + np.uint32(seed)) ^ words.astype(module.uint32)) for seed in _SEEDS)
    return module.stack([module.sum(x, dtype=module.uint32) for x in hashes])


def _mix(x: Any) -> Any:
    """The finaliser of MurmurHash3, a bijection of 32-bit integers."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
