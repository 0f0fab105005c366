"""Gathers weights over mesh axes that split them between uses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxalign.models.adapters.lora import TRAINED, is_quantised
from jaxalign.models.adapters.quantised import fitting
from jaxalign.parallel.ordered import after, dependent
from jaxalign.parallel.pipeline import is_pipelined
from jaxalign.parallel.sharding import Sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered_head(sharding: Sharding, cast: bool, weight: jax.Array) -> jax.Array:
    """A head's weight [D, V], gathered over all mesh axes except those of the vocabulary. Its gradient is not gathered.

    cast: whether the weight is the result of a cast. The GPU compiler would gather before it casts, which sends twice the
    bytes of bfloat16.
    """
    return _gathered_head(sharding, cast, weight)


def _gathered_head(sharding: Sharding, cast: bool, weight: jax.Array) -> jax.Array:
    if cast and sharding.mesh.size > 1 and sharding.platform == "gpu":
        weight = jax.lax.optimization_barrier(weight)
    return sharding.constrain(weight, (None, "vocab"))


gathered_head.defvjp(
    lambda sharding, cast, weight: (_gathered_head(sharding, cast, weight), None),
    lambda sharding, cast, _, gradient: (gradient,),
)


def gathered_weights(sharding: Sharding, params: Any, axes: Any, compute_dtype: str, first: Any) -> Any:
    """Parameters in which the weights that fsdp splits are cast to the compute dtype and gathered over fsdp.

    Adapters are small and stay as they are. Quantised kernels are gathered as they are stored. Layers are gathered one after
    another: XLA stores a stack that it gathers at once a second time, because it transposes the result.

    Args:
      sharding: the sharding of training.
      params: a dict of nested dicts of arrays, those of all layers stacked in "blocks".
      axes: the logical axis names of each array.
      compute_dtype: the dtype in which the model multiplies.
      first: arrays to wait for before anything is gathered.
    """
    blocks = params.get("blocks")
    rest = {name: value for name, value in params.items() if name != "blocks" and name not in TRAINED}
    gathered = {**params, **_gathered(sharding, rest, axes, compute_dtype, first)}
    if blocks is None:
        return gathered
    blocks = after(sharding, blocks, {name: gathered[name] for name in rest})
    if is_pipelined(sharding):  # A loop over layers would gather them over pipeline.
        return gathered | {"blocks": _gathered(sharding, blocks, axes["blocks"], compute_dtype, first)}
    of_layer = jax.tree.map(lambda names: names[1:], axes["blocks"], is_leaf=lambda names: isinstance(names, tuple))

    def gather_layer(i, stacks: Any) -> Any:
        layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), blocks)
        layer = _gathered(sharding, layer, of_layer, compute_dtype, first)
        return jax.tree.map(lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, i, 0), stacks, layer)

    shapes = jax.eval_shape(lambda: _gathered(sharding, blocks, axes["blocks"], compute_dtype, first))
    # Each stack starts with a number of its own: XLA would store a common one once more, for all the stacks that start with it.
    numbers = dependent([jnp.float32(i) for i in range(len(jax.tree.leaves(shapes)))], first)
    starts = jax.tree.unflatten(jax.tree.structure(shapes), numbers)
    stacks = jax.tree.map(lambda shape, start: jnp.full(shape.shape, start, shape.dtype), shapes, starts)
    return gathered | {"blocks": jax.lax.fori_loop(0, jax.tree.leaves(blocks)[0].shape[0], gather_layer, stacks)}


def _gathered(sharding: Sharding, params: Any, axes: Any, compute_dtype: str, first: Any) -> Any:
    """`gathered_weights` of all arrays at once."""
    if isinstance(params, dict):
        return {name: _gathered(sharding, value, axes[name], compute_dtype, first) for name, value in params.items()}
    if "embed" not in axes:
        return params

    def gather(x: jax.Array) -> jax.Array:
        split, whole = (fitting(rules.named(axes), x.shape) for rules in (sharding, sharding.gathered))
        # The barrier keeps XLA from gathering first and casting afterwards, which would send twice the bytes.
        x = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(dependent(x, first), split))
        x = jax.lax.with_sharding_constraint(x, whole)
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(gather, params) if is_quantised(params) else gather(params.astype(compute_dtype))
