"""A frozen base in fewer bits: what adapters stand on need not be float32.

int8: one scale for each output of a linear layer. nf4: four bits from the table of NormalFloat (QLoRA, arXiv 2305.14314), one
scale for each block of 64 numbers along a layer's input. Both are by the `qwix` library, whose QArray stands in the kernel's
place in the parameter tree; a layer's kernels become arrays again only while that layer is computed. Embeddings are bfloat16
then; norms, biases, routers and scales stay float32.
"""

from __future__ import annotations

import math
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
    """The weights of a base, each stored as `kind` says, where it was. The buffers given are freed, one after another."""
    if kind == "float32":
        return params

    def convert(path: tuple, leaf: jax.Array):
        found = _converted(path, leaf, kind)
        if found is not leaf and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            jax.block_until_ready(found)
            leaf.delete()
        return found

    return _map(convert, params, ())


def quantise_abstract(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """The shapes of `quantise`'s result, from those of a base; with its shardings where those of the base are known."""
    if kind == "float32":
        return params

    def convert(path: tuple, leaf: jax.ShapeDtypeStruct):
        found = jax.eval_shape(lambda x: _converted(path, x, kind), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if not isinstance(leaf.sharding, NamedSharding):
            return found

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = NamedSharding(leaf.sharding.mesh, fitting(leaf.sharding, x.shape))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(placed, found)

    return _map(convert, params, ())


def _converted(path: tuple, leaf: jax.Array, kind: str):
    """One weight of a base as `kind` says; the very same where it says nothing of it."""
    if kind != "bfloat16" and path[0] == "blocks" and path[1:] in LINEAR and "router" not in path:
        return _quantised(leaf, kind, *_axes(path, leaf.ndim))
    if path[0] in _TABLES or (path[0] == "blocks" and path[1:] in LINEAR):
        return jax.jit(lambda x: x.astype(jnp.bfloat16))(leaf)
    return leaf


def _map(convert, tree, path: tuple):
    if not isinstance(tree, dict):
        return convert(path, tree)
    return {name: _map(convert, value, (*path, name)) for name, value in tree.items()}


def _axes(path: tuple, ndim: int) -> tuple[tuple[int, ...], int]:
    """(axes that a kernel's outputs are summed over, the last of them). Before them stand layers, and experts if any."""
    count = LINEAR[path[1:]][0]
    # The kernel of an expert, [L, E, in, out], has one axis more than that of an MLP.
    first = 2 if path[1] == "mlp" and ndim == 4 else 1
    return tuple(range(first, first + count)), first + count - 1


def _quantised(kernel: jax.Array, kind: str, inputs: tuple[int, ...], last: int):
    import qwix

    if kind == "int8":
        channels, tiles = tuple(axis for axis in range(kernel.ndim) if axis not in inputs), {}
    else:
        channels = tuple(axis for axis in range(kernel.ndim) if axis != last)
        tiles = {last: math.gcd(BLOCK, kernel.shape[last])}
    qtype = jnp.int8 if kind == "int8" else "nf4"

    def compute(x: jax.Array):
        return qwix.quantize(x.astype(jnp.float32), qtype, channelwise_axes=channels, tiled_axes=tiles)

    here = getattr(kernel, "sharding", None)
    if not isinstance(here, NamedSharding):
        return jax.jit(compute)(kernel)
    where = jax.tree.map(lambda x: NamedSharding(here.mesh, fitting(here, x.shape)), jax.eval_shape(compute, kernel))
    return jax.jit(compute, out_shardings=where)(kernel)


def fitting(sharding: NamedSharding, shape: tuple[int, ...]) -> PartitionSpec:
    """The kernel's own split, but for axes too short for it: scales are fewer than weights."""
    entries = []
    for axis, size in enumerate(shape):
        names = sharding.spec[axis] if axis < len(sharding.spec) else None
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        entries.append(names if names and size % parts == 0 else None)
    return PartitionSpec(*entries)


def stored_bytes(params: Any) -> int:
    """Bytes of a parameter tree as devices hold it: two numbers of four bits to a byte."""
    return sum(math.ceil(np.prod(leaf.shape) * _bits(leaf.dtype) / 8) for leaf in jax.tree.leaves(params))


def _bits(dtype) -> int:
    return 4 if dtype in (jnp.uint4, jnp.int4) else np.dtype(dtype).itemsize * 8
