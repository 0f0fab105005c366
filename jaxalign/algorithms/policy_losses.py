"""The policy's losses, per token; `masked.aggregate` makes one number of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape


class SurrogateStats(NamedTuple):
    """What PPO reports of a step, per token and without gradient; to be averaged under the mask.

    ratio: float32, new over old probability. clipped: bool, the clipped term is the one that counts, so that the token
    has no gradient. approx_kl: float32, the k3 estimate of KL(old || new), never negative.
    """

    ratio: jax.Array
    clipped: jax.Array
    approx_kl: jax.Array


def clipped_surrogate(
    logprobs: Any, old_logprobs: Any, advantages: Any, clip_low: Any = 0.2, clip_high: Any = 0.2, mask: Any = None
) -> tuple[jax.Array, SurrogateStats]:
    """PPO's clipped objective, as a loss (Schulman et al. 2017, arXiv 1707.06347, equation 7).

        ratio = exp(logprobs - old_logprobs)
        loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    Args:
      logprobs: real, any shape, usually [B, N]; log-probabilities of the sampled tokens under the policy in training.
      old_logprobs: the same shape, under the policy that sampled; no gradient flows into it.
      advantages: the same shape; no gradient flows into it.
      clip_low: scalar in [0, 1].
      clip_high: scalar, not negative; above `clip_low` for the asymmetric clip of DAPO (arXiv 2503.14476).
      mask: bool, int or float of that shape, or None. Masked tokens have loss 0, ratio 1 and no gradient, whatever
        stands there; without it garbage at padding may overflow `exp` and make the gradient NaN.

    Returns:
      (loss, stats): loss float32 of that shape.

    Raises:
      ValueError: the shapes differ, or a clip is outside its range.
    """
    mask = jnp.ones(jnp.shape(logprobs), bool) if mask is None else jnp.asarray(mask) != 0
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    for name, clip, high in (("clip_low", clip_low, 1), ("clip_high", clip_high, jnp.inf)):
        require_shape(name, clip, "scalar", ())
        require_range(name, clip, 0, high)
    old_logprobs = jax.lax.stop_gradient(as_float("old_logprobs", old_logprobs))
    advantages = jax.lax.stop_gradient(as_float("advantages", advantages))
    # Masked before `exp`: a 0 cotangent times an infinite derivative is NaN.
    log_ratio = jnp.where(mask, as_float("logprobs", logprobs) - old_logprobs, 0)
    advantages = jnp.where(mask, advantages, 0)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    # KL(old || new) on samples of the old policy: k3 with d = log old - log new = -log_ratio.
    stats = SurrogateStats(ratio, bounded > plain, jnp.expm1(log_ratio) - log_ratio)
    return jnp.maximum(plain, bounded), jax.lax.stop_gradient(stats)
