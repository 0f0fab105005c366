"""Gradient accumulation: sums a loss, already normalised by totals of the whole batch, over micro-batches in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.models.adapters.lora import join
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.traced import traced
from jaxalign.steps.loss_scale import LossScale


def split(batch, micro_batches: int):
    """[B, ...] to [m, B/m, ...]. Row i goes to micro-batch i mod m, so that rows sharded over B stay on their devices."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)


# Tokens per micro-batch on a CPU: with fewer, matrix products are slow; with more, activations exceed the caches.
LEAST_TOKENS = 1024


def chosen(micro_batches: int, rows: int, length: int, sharding: Sharding) -> int:
    """The number of micro-batches for a step of `rows` rows of `length` tokens.

    `micro_batches`, unless it is 0. Then 1; or, on one CPU device, the largest number of equal micro-batches with at
    least `LEAST_TOKENS` tokens and two rows each.
    """
    if micro_batches or sharding.mesh.size > 1 or sharding.platform != "cpu":
        return micro_batches or 1
    fits = [n for n in range(1, rows // 2 + 1) if rows % n == 0 and rows // n * length >= LEAST_TOKENS]
    return max(fits, default=1)


def total_weight(weight: jax.Array) -> jax.Array:
    """The sum of the weights of a batch's rows, by which its losses are divided: float32 [], 1 if every weight is 0."""
    total = jnp.sum(weight)
    return jnp.where(total > 0, total, 1.0)


class Aux(NamedTuple):
    """Scalars that a loss reports. Over micro-batches, `sums` are added and the largest value of each of `maxima` is kept.

    Both are dicts, not records: a loss computes only some of its step's metrics, and each is in one of the two. The step passes
    them by name to its record in `steps.metrics` or `rl.metrics`.
    """

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array] = {}  # noqa: RUF012


class Parts(NamedTuple):
    """The micro-batches of a batch: `of(i)` is micro-batch i; count is their number, an int or int32 [], at least 1."""

    of: Callable[[Any], Any]
    count: Any


def parts_of(batch, micro_batches: int) -> Parts:
    """Splits a batch into equal micro-batches with `split`."""
    if micro_batches == 1:
        return Parts(lambda _: batch, 1)
    parts = split(batch, micro_batches)
    return Parts(lambda i: jax.tree.map(lambda x: jnp.asarray(x)[i], parts), micro_batches)


def accumulate(
    loss_fn: Callable, params, parts: Parts, place: Callable | None = None, loss_scale: LossScale | None = None, frozen=None,
    in_use: Callable | None = None,
):
    """((loss, Aux), gradients), combined over the micro-batches.

    Args:
      loss_fn: `loss_fn(joined, part) -> (loss, Aux)`, where joined is `join(frozen, params)`. The loss and `Aux.sums` are sums
        over the part, divided by totals of the whole batch.
      params: the trained parameters. The gradients have their dtypes.
      place: constrains the sharding of the gradients of each micro-batch (`Model.constrain_gradients`).
      loss_scale: the loss scale of the training state. It only keeps small values in the backward pass from underflowing: the
        returned loss, `Aux` and gradients do not include it.
      frozen: the base under adapters, or None.
      in_use: converts params and frozen for the whole loop (`Model.in_use`); its second argument is a pytree of arrays to wait
        for.
    """
    used, frozen = (params, frozen) if in_use is None else (in_use(tree, parts.of(0)) for tree in (params, frozen))

    def scaled_loss(used, part):
        loss, aux = loss_fn(join(frozen, used), part)
        return loss if loss_scale is None else loss * loss_scale.scale, (loss, aux)

    def grad_fn(part):
        (_, out), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(used, part)
        gradients = jax.tree.map(lambda x, own: x.astype(own.dtype), gradients, params)
        if loss_scale is not None:
            gradients = jax.tree.map(lambda x: (x / loss_scale.scale).astype(x.dtype), gradients)
        return out, gradients if place is None else place(gradients)

    if isinstance(parts.count, int) and parts.count == 1:
        return grad_fn(parts.of(0))

    one, ((loss, aux), _) = traced(lambda i: grad_fn(parts.of(i)), jax.ShapeDtypeStruct((), jnp.int32))

    def add_part(i, total):
        (loss, aux), gradients = total
        (part_loss, part_aux), part_gradients = one(i)
        sums = jax.tree.map(jnp.add, aux.sums, part_aux.sums)
        maxima = jax.tree.map(jnp.maximum, aux.maxima, part_aux.maxima)
        return (loss + part_loss, Aux(sums, maxima)), jax.tree.map(jnp.add, gradients, part_gradients)

    # Start the sum from zeros instead of the first part, so that the loss is compiled once.
    loss, aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, aux))
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    least = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), aux.maxima)
    start = (loss, Aux(aux.sums, least)), gradients if place is None else place(gradients)
    return jax.lax.fori_loop(0, parts.count, add_part, start)
