"""Gradient accumulation in a scan: sums over micro-batches of a loss already divided by the global count (Decision 7)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def split(batch, micro_batches: int):
    """[B, ...] to [m, B/m, ...]. Rows are dealt out in turn, so that a batch sharded over B stays where it is."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)


def accumulate(loss_fn: Callable, params, batch, micro_batches: int):
    """(loss, sums), gradients of `loss_fn(params, batch) -> (loss, sums)`, added over micro-batches.

    `loss_fn` must return sums divided by totals of the whole batch, taken before the split; `sums` is any pytree of such.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if micro_batches == 1:
        return grad_fn(params, batch)
    parts = split(batch, micro_batches)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], parts)))
    total, _ = jax.lax.scan(lambda acc, part: (jax.tree.map(jnp.add, acc, grad_fn(params, part)), None), zero, parts)
    return total
