"""Critic losses per token, and the critic's explained variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import as_float, is_set, require_positive_scalar, require_same_shape, require_scalar, shape_of
from jaxalign.algorithms.masked import masked_variance


def clipped_value_loss(
    values: Any, old_values: Any, returns: Any, clip: Any = None, mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Half the squared error of the critic's value, or of the value clipped around the old one where that error is larger.

        loss = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Source: OpenAI Baselines' PPO, also used by Ziegler et al. 2019 (detail 9 of "The 37 implementation details of PPO").

    Args:
      values: real, any shape, usually [B, N].
      old_values: the same shape, from before the update; no gradient flows into it.
      returns: the same shape; no gradient flows into it.
      clip: scalar, not negative; None for the unclipped loss. 0 differs from None: it allows no change of the value, so there
        is no gradient.
      mask: bool, int or float of that shape, or None. Masked tokens have loss 0 and no gradient, whatever their values.

    Returns:
      (loss, clipped): float32 of that shape, and bool of that shape: whether the clipped term is the larger one.

    Raises:
      ValueError: the shapes differ, or the clip is negative.
    """
    return _clipped(values, old_values, returns, clip, mask, lambda error: 0.5 * error**2)


def huber_value_loss(
    values: Any, returns: Any, delta: Any = 1.0, mask: Any = None, old_values: Any = None, clip: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The critic's Huber loss (Huber 1964): half the square of a small error, linear in a large error.

        huber(e) = e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2)
        loss = max(huber(V - R), huber(V_old + clip(V - V_old, -c, c) - R))

    Its gradient stays within +-delta, so an outlier among the returns cannot dominate. Without `clip` the loss is the first
    term. The clip selects the same tokens as in `clipped_value_loss`, since both losses increase with the error.

    Args:
      values: real, any shape, usually [B, N].
      returns: the same shape; no gradient flows into it.
      delta: scalar above 0, in units of the return. If it exceeds every error, the loss is half the squared error.
      mask: bool, int or float of that shape, or None. Masked tokens have loss 0 and no gradient, whatever their values.
      old_values: the same shape, from before the update; no gradient flows into it. Needed with `clip`, otherwise ignored.
      clip: scalar, not negative; None for no clip.

    Returns:
      (loss, clipped): float32 of that shape, and bool of that shape: whether the clipped term is the larger one.

    Raises:
      ValueError: the shapes differ, delta is not above 0, clip is negative, or clip is given without `old_values`.
    """
    require_positive_scalar("delta", delta)
    if clip is not None and old_values is None:
        raise ValueError(f"clip is {clip}, which needs old_values")

    def huber(error: jax.Array) -> jax.Array:
        size = jnp.abs(error)
        inner = jnp.minimum(size, delta)
        return inner * (size - 0.5 * inner)

    return _clipped(values, values if old_values is None else old_values, returns, clip, mask, huber)


def explained_variance(values: Any, returns: Any, mask: Any) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the unmasked tokens: 1 is perfect, 0 no better than a constant.

    Args:
      values: real [B, N].
      returns: real [B, N].
      mask: bool, int or float [B, N].

    Returns:
      float32 scalar, possibly negative; 0 if all returns are equal.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    values, returns = as_float("values", values), as_float("returns", returns)
    variance = masked_variance(returns, mask)
    unexplained = masked_variance(returns - values, mask)
    return jnp.where(variance > 0, 1 - unexplained / jnp.where(variance > 0, variance, 1), 0)


def _clipped(
    values: Any, old_values: Any, returns: Any, clip: Any, mask: Any, cost: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """-> (the larger cost of the plain and the clipped value; bool, where that is the clipped one)."""
    mask = jnp.ones(shape_of("values", values), bool) if mask is None else is_set(mask)
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (
        jnp.where(mask, as_float(name, x), 0)
        for name, x in (("values", values), ("old_values", old_values), ("returns", returns))
    )
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    plain = cost(values - returns)
    if clip is None:
        return plain, jnp.zeros_like(mask)
    require_scalar("clip", clip, 0)
    # Not V_old + clip(V - V_old, -c, c): that can differ from V by an ulp where nothing is clipped, and would count as clipped.
    bounded = cost(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    larger = jnp.maximum(plain, bounded)
    # With a clip of 0, rounding would decide which of the two has a gradient.
    return jnp.where(clip == 0, jax.lax.stop_gradient(larger), larger), bounded > plain
