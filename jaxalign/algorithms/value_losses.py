"""The critic's loss, per token, and the measure of what it explains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape
from jaxalign.algorithms.masked import masked_variance


def clipped_value_loss(
    values: Any, old_values: Any, returns: Any, clip: Any = None, mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Half the squared error of the critic, no better than if its move away from the old value were clipped.

        loss = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Source: the baselines' PPO, kept by Ziegler et al. 2019 (detail 9 of "The 37 implementation details of PPO").

    Args:
      values: real, any shape, usually [B, N].
      old_values: the same shape, from before the update; no gradient flows into it.
      returns: the same shape; no gradient flows into it.
      clip: scalar, not negative; None for the plain half square. 0 is not None: it allows no move at all.
      mask: bool, int or float of that shape, or None. Masked tokens have loss 0 and no gradient, whatever stands there.

    Returns:
      (loss, clipped): float32 of that shape, and bool of that shape: the clipped term is the one that counts.

    Raises:
      ValueError: the shapes differ, or a negative clip.
    """
    mask = jnp.ones(jnp.shape(values), bool) if mask is None else jnp.asarray(mask) != 0
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (
        jnp.where(mask, as_float(name, x), 0)
        for name, x in (("values", values), ("old_values", old_values), ("returns", returns))
    )
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, jnp.zeros_like(mask)
    require_shape("clip", clip, "scalar", ())
    require_range("clip", clip, 0)
    bounded = (old_values + jnp.clip(values - old_values, -clip, clip) - returns) ** 2
    return 0.5 * jnp.maximum(plain, bounded), bounded > plain


def explained_variance(values: Any, returns: Any, mask: Any) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the unmasked tokens: 1 perfect, 0 no better than a constant.

    Args:
      values: real [B, N].
      returns: real [B, N].
      mask: bool, int or float [B, N].

    Returns:
      float32 scalar, possibly negative; 0 where the returns do not differ, since there is nothing to explain.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    values, returns = as_float("values", values), as_float("returns", returns)
    variance = masked_variance(returns, mask)
    unexplained = masked_variance(returns - values, mask)
    return jnp.where(variance > 0, 1 - unexplained / jnp.where(variance > 0, variance, 1), 0)
