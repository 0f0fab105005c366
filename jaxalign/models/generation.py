"""The weights for generation: placed by its sharding rules, with matrices in the compute dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.models.adapters.lora import TRAINED, is_quantised
from jaxalign.models.adapters.quantised import fitting
from jaxalign.parallel.sharding import Sharding

_MOVED_TOGETHER = 64 << 20
"""A parameter with more bytes than this on a device is moved in its own step, to limit the memory that is allocated twice."""

Moves = list[tuple[list[int], Callable]]


def abstract(params: Any, axes: Any, compute_dtype: str, sharding: Sharding, trained: bool = False) -> Any:
    """ShapeDtypeStructs of parameters for generation, with their shardings.

    Adapters and scalar heads keep their dtype, since their sums need it.

    Args:
      params: arrays or ShapeDtypeStructs.
      axes: a pytree like params, with the logical axis names of each leaf.
      compute_dtype: the dtype of matrices.
      sharding: the sharding rules of generation.
      trained: whether params are adapters or a scalar head.
    """
    if isinstance(params, dict):
        return {
            name: abstract(value, axes[name], compute_dtype, sharding, trained or name in TRAINED)
            for name, value in params.items()
        }
    where = sharding.named(axes)
    if is_quantised(params):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitting(where, x.shape)), params
        )
    matrix = len(axes) - (axes[0] == "layers") >= 2
    dtype = compute_dtype if matrix and not trained else params.dtype
    return jax.ShapeDtypeStruct(params.shape, dtype, sharding=where)


def moves(params: Any, targets: Any) -> Moves:
    """The steps that convert parameters to `targets`: (indices of leaves, a jitted function of the list of these leaves).

    Leaves that already match their target need no step.
    """
    leaves, targets = jax.tree.leaves(params), jax.tree.leaves(targets)
    large, small = [], []
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        here = getattr(leaf, "sharding", None)  # A numpy array has none.
        if leaf.dtype == target.dtype and here is not None and here.is_equivalent_to(target.sharding, leaf.ndim):
            continue
        device_bytes = math.prod(target.sharding.shard_shape(target.shape)) * jnp.dtype(target.dtype).itemsize
        if device_bytes > _MOVED_TOGETHER:
            large.append(i)
        else:
            small.append(i)
    groups = [[i] for i in large] + ([small] if small else [])
    return [(group, _mover(tuple((targets[i].dtype, targets[i].sharding) for i in group))) for group in groups]


@functools.lru_cache(maxsize=32)
def _mover(targets: tuple) -> Callable:
    """A jitted function that converts a list of arrays to their targets' dtypes and shardings."""

    def move(arrays: list[jax.Array]) -> list[jax.Array]:
        return [x.astype(dtype) for x, (dtype, _) in zip(arrays, targets, strict=True)]

    return jax.jit(move, out_shardings=[sharding for _, sharding in targets])
