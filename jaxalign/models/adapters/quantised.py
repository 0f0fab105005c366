"""Stores the frozen base under adapters in fewer bits than float32.

int8: one scale per output of a linear layer. nf4: four-bit NormalFloat (QLoRA, arXiv 2305.14314), one scale per block of 64
numbers along a layer's input. Both use the `qwix` library, whose QArray replaces the kernel in the parameter tree; a layer's
kernels are dequantised only while that layer is computed. Embeddings are then bfloat16; norms, biases, routers and scales stay
float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.models.adapters.lora import LINEAR

KINDS = ("float32", "bfloat16", "int8", "nf4")
BLOCK = 64
_TABLES = ("embedding", "unembedding")


def quantise(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """Converts the weights of a base to `kind`, with the same placement. Frees the given buffers one after another."""
    return params if kind == "float32" else _map(lambda path, leaf: quantise_leaf(path, leaf, kind), params, ())


def quantise_leaf(path: tuple, leaf: jax.Array, kind: str) -> Any:
    """Converts the weight at `path` of a base to `kind`, and frees the given buffer."""
    converted = _converted(path, leaf, kind)
    if converted is not leaf and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        jax.block_until_ready(converted)
        leaf.delete()
    return converted


def reading_dtype(path: tuple, kind: str, files: Collection[np.dtype]) -> np.dtype:
    """The narrowest dtype in which a weight can be read from files so that `quantise_leaf` gives the same as from float32.

    Args:
      path: the weight's path in the parameters.
      kind: how it will be stored.
      files: the dtypes of its parts in the files.
    """
    if _is_rounded(path, kind):
        return np.dtype(jnp.bfloat16)
    narrow = [dtype for dtype in files if dtype.itemsize < np.dtype(np.float32).itemsize]
    if kind != "float32" and _is_kernel(path) and len(files) == len(narrow) == 1:
        return narrow[0]
    return np.dtype(np.float32)


def quantise_abstract(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """The shapes of `quantise`'s result, given those of a base; with shardings if the base has them."""
    if kind == "float32":
        return params

    def convert(path: tuple, leaf: jax.ShapeDtypeStruct):
        shapes = jax.eval_shape(lambda x: _converted(path, x, kind), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        where = leaf.sharding
        if not isinstance(where, NamedSharding):
            return shapes
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitting(where, x.shape)), shapes
        )

    return _map(convert, params, ())


def _converted(path: tuple, leaf: jax.Array, kind: str):
    """One weight of a base converted to `kind`; the same object if `kind` does not affect it."""
    if _is_rounded(path, kind):
        return leaf if leaf.dtype == jnp.bfloat16 else jax.jit(lambda x: x.astype(jnp.bfloat16))(leaf)
    return _quantised(path, leaf, kind) if kind != "float32" and _is_kernel(path) and "router" not in path else leaf


def _is_kernel(path: tuple) -> bool:
    """Whether the weight at `path` is the kernel of a linear layer."""
    return path[0] == "blocks" and path[1:] in LINEAR


def _is_rounded(path: tuple, kind: str) -> bool:
    """Whether `kind` stores the weight at `path` in bfloat16."""
    if kind == "float32":
        return False
    return path[0] in _TABLES or (_is_kernel(path) and (kind == "bfloat16" or "router" in path))


def _map(convert, tree, path: tuple):
    if not isinstance(tree, dict):
        return convert(path, tree)
    return {name: _map(convert, value, (*path, name)) for name, value in tree.items()}


def _quantised(path: tuple, kernel: jax.Array, kind: str):
    import qwix

    # The axes of layers, and of experts if any, precede the input axes: the kernel of experts, [L, E, in, out], has one axis
    # more than that of an MLP.
    first = 2 if path[1] == "mlp" and kernel.ndim == 4 else 1
    inputs = range(first, first + LINEAR[path[1:]][0])
    if kind == "int8":
        channels, tiles = tuple(axis for axis in range(kernel.ndim) if axis not in inputs), {}
    else:
        channels = tuple(axis for axis in range(kernel.ndim) if axis != inputs[-1])
        tiles = {inputs[-1]: math.gcd(BLOCK, kernel.shape[inputs[-1]])}
    qtype = jnp.int8 if kind == "int8" else "nf4"

    def compute(x: jax.Array):
        return qwix.quantize(x.astype(jnp.float32), qtype, channelwise_axes=channels, tiled_axes=tiles)

    here = getattr(kernel, "sharding", None)
    if not isinstance(here, NamedSharding):
        return jax.jit(compute)(kernel)
    where = jax.tree.map(lambda x: fitting(here, x.shape), jax.eval_shape(compute, kernel))
    return jax.jit(compute, out_shardings=where)(kernel)


def fitting(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The kernel's sharding, without axes of `shape` that it does not divide: scales have smaller axes than weights."""
    entries = []
    for axis, size in enumerate(shape):
        names = sharding.spec[axis] if axis < len(sharding.spec) else None
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        entries.append(names if names and size % parts == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))
