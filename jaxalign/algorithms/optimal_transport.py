"""Alignment via optimal transport (AOT, Melnyk et al. 2024, arXiv 2406.05882): compares two distributions by quantile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.answer_inputs import weigh


def transport(
    better: jax.Array, worse: jax.Array, label: jax.Array, selected: jax.Array, beta: Any, flips: Any
) -> jax.Array:
    """The AOT loss per row, float32 [B]: how far the distribution `better` is from dominating the distribution `worse`.

    Each row contributes two atoms to both distributions, [2 B], one for each order of its pair.
    """
    weights = jnp.where(selected[None, :], jnp.stack([label, 1 - label]), 0).reshape(-1)

    def cost(violation: jax.Array) -> jax.Array:
        kept, flipped = (-beta * violation,), (beta * violation,)
        return weigh(1 - flips, jax.nn.softplus, kept) + weigh(flips, jax.nn.softplus, flipped)

    return jnp.sum(_coupled(better, worse, weights, cost).reshape(2, -1), axis=0)


def _coupled(x: jax.Array, y: jax.Array, weights: jax.Array, cost: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The cost of each atom of `x` when `x` and `y`, both with weights [M], are coupled quantile by quantile. float32 [M].

    With weights of 0 and 1 this pairs the sorted values. An atom of fractional weight is split where an atom of `y` ends.
    """
    # Atoms without weight are sorted last, where no quantile reaches them.
    order_x, order_y = (jnp.argsort(jnp.where(weights > 0, values, jnp.inf)) for values in (x, y))
    ends_x, ends_y = jnp.cumsum(weights[order_x]), jnp.cumsum(weights[order_y])
    cuts = jnp.sort(jnp.concatenate([ends_x, ends_y]))
    starts = jnp.concatenate([jnp.zeros(1, cuts.dtype), cuts[:-1]])
    middles, widths = 0.5 * (starts + cuts), cuts - starts
    last = max(weights.shape[0] - 1, 0)
    i, j = (
        order[jnp.minimum(jnp.searchsorted(ends, middles, side="right"), last)]
        for order, ends in ((order_x, ends_x), (order_y, ends_y))
    )
    # Two equal infinite quantiles do not differ.
    violation = jnp.where(jnp.isinf(x[i]) & (x[i] == y[j]), 0, x[i] - y[j])
    return jnp.zeros_like(weights).at[i].add(weigh(widths, cost, (violation,)))
