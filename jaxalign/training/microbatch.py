"""Gradient accumulation in a loop: sums over micro-batches of a loss already divided by the global count (Decision 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.parallel.sharding import Sharding, platform_of
from jaxalign.training.loss_scale import LossScale


def split(batch, micro_batches: int):
    """[B, ...] to [m, B/m, ...]. Rows are dealt out in turn, so that a batch sharded over B stays where it is."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)


LEAST_TOKENS = 1024  # Of a part chosen on a CPU: below, matrix products are slow; above, what a layer makes leaves its caches.


def chosen(micro_batches: int, rows: int, length: int, sharding: Sharding | None) -> int:
    """In how many parts to compute a step of `rows` rows of `length` tokens: micro_batches, if it is not 0; else one, but on a
    CPU as many as leave each at least `LEAST_TOKENS` tokens and two rows."""
    if micro_batches or sharding is not None or platform_of(sharding) != "cpu":
        return micro_batches or 1
    fits = [n for n in range(1, rows // 2 + 1) if rows % n == 0 and rows // n * length >= LEAST_TOKENS]
    return max(fits, default=1)


class Aux(NamedTuple):
    """What a loss reports beside its gradient: `sums` add up over micro-batches, of `maxima` the largest counts."""

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array] = {}  # noqa: RUF012


def _combine(first, second):
    (loss, aux), gradients = first
    (other_loss, other), other_gradients = second
    sums = jax.tree.map(jnp.add, aux.sums, other.sums)
    maxima = jax.tree.map(jnp.maximum, aux.maxima, other.maxima)
    return (loss + other_loss, Aux(sums, maxima)), jax.tree.map(jnp.add, gradients, other_gradients)


class Parts(NamedTuple):
    """The micro-batches of a batch: `of(i)` is the i-th. count: how many there are, a number or int32 []; at least 1."""

    of: Callable[[Any], Any]
    count: Any


def parts_of(batch, micro_batches: int) -> Parts:
    """A batch in equal parts, by `split`."""
    if micro_batches == 1:
        return Parts(lambda _: batch, 1)
    parts = split(batch, micro_batches)
    return Parts(lambda i: jax.tree.map(lambda x: jnp.asarray(x)[i], parts), micro_batches)


def accumulate(
    loss_fn: Callable, params, parts: Parts, place: Callable | None = None, loss_scale: LossScale | None = None
):
    """(loss, Aux), gradients of `loss_fn(params, part) -> (loss, Aux)`, combined over the parts of a batch.

    The loss and `Aux.sums` must be sums over the part given, divided by totals of the whole batch, taken before the split.
    place: says how gradients lie (`Model.constrain_gradients`), those of each micro-batch.
    loss_scale: that of the training state. It acts in here alone: loss, `Aux` and gradients are as without one, but where the
    backward pass would have lost small numbers or, with too high a scale, overflows.
    """

    def scaled_loss(params, part):
        loss, aux = loss_fn(params, part)
        return loss if loss_scale is None else loss * loss_scale.scale, (loss, aux)

    def grad_fn(params, part):
        (_, out), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params, part)
        if loss_scale is not None:
            gradients = jax.tree.map(lambda x: x / loss_scale.scale, gradients)
        return out, gradients if place is None else place(gradients)

    if isinstance(parts.count, int) and parts.count == 1:
        return grad_fn(params, parts.of(0))
    # From zeros, and not from the first part: the loss is then compiled once, and not twice.
    (loss, aux), gradients = jax.eval_shape(lambda: grad_fn(params, parts.of(0)))
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
    least = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), aux.maxima)
    gradients = zeros(gradients)
    start = (zeros(loss), Aux(zeros(aux.sums), least)), gradients if place is None else place(gradients)
    return jax.lax.fori_loop(0, parts.count, lambda i, total: _combine(total, grad_fn(params, parts.of(i))), start)
