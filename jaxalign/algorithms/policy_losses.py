"""Policy losses per token; `masked.aggregate` reduces them to a scalar.

No gradient flows into advantages or old log-probabilities, and masked tokens have loss 0 and no gradient, whatever their
values. Ratios are capped at e^60, so that `exp` does not overflow. A log-probability of -inf counts as -1e30, without gradient.
An entropy bonus is a separate loss: -coef * aggregate(entropy, mask).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_positive,
    require_positive_scalar,
    require_same_shape,
    require_scalar,
    require_shape,
    shape_of,
)
from jaxalign.algorithms.importance import LARGE, LOG_RATIO_LIMIT, importance_weights
from jaxalign.algorithms.masked import masked_mean


class SurrogateStats(NamedTuple):
    """Statistics of a policy loss, per token and without gradient; to be averaged under the mask.

    ratio: float32, new over old probability; in `gspo`, that of the sequence. clipped: bool, the clipped term was taken, so
    the token has no gradient; in `cispo`, which keeps the gradient, the weight was clipped. approx_kl: float32, the k3
    estimate of KL(old || new), never negative.
    """

    ratio: jax.Array
    clipped: jax.Array
    approx_kl: jax.Array


def clipped_surrogate(
    logprobs: Any,
    old_logprobs: Any,
    advantages: Any,
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    mask: Any = None,
    dual_clip: Any = None,
) -> tuple[jax.Array, SurrogateStats]:
    """PPO's clipped objective, as a loss (Schulman et al. 2017, arXiv 1707.06347, equation 7).

        ratio = exp(logprobs - old_logprobs)
        loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)),    capped at -A dual_clip where A < 0

    Args:
      logprobs: real, any shape, usually [B, N]; log-probabilities of the sampled tokens under the policy in training.
      old_logprobs: the same shape, under the policy that sampled them; no gradient flows into it.
      advantages: the same shape; no gradient flows into it.
      clip_low: scalar in [0, 1].
      clip_high: scalar, not negative; above `clip_low` for the asymmetric clip of DAPO (arXiv 2503.14476).
      mask: bool, int or float of that shape, or None. Masked tokens have loss 0, ratio 1 and no gradient, whatever
        their values.
      dual_clip: scalar above 1, the largest ratio for tokens of negative advantage, where the clip sets no upper bound
        (Ye et al. 2020, arXiv 1912.09729, who use 3); None for no bound.

    Returns:
      (loss, stats): loss float32 of that shape.

    Raises:
      ValueError: the shapes differ, or a clip is outside its range.
    """
    mask, log_ratio, advantages = _prepare(logprobs, old_logprobs, advantages, clip_low, clip_high, mask)
    ratio = jnp.exp(log_ratio)
    loss, clipped = _clip(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        require_shape("dual_clip", dual_clip, "scalar", ())
        require_positive("dual_clip - 1", dual_clip - 1)
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, clipped = jnp.where(beyond, bound, loss), clipped | beyond
    return loss, _stats(ratio, clipped, log_ratio)


def gspo(
    logprobs: Any,
    old_logprobs: Any,
    advantages: Any,
    clip_low: Any = 3e-4,
    clip_high: Any = 4e-4,
    mask: Any = None,
) -> tuple[jax.Array, SurrogateStats]:
    """Group sequence policy optimisation (GSPO): the length-normalised ratio of the whole response (arXiv 2507.18071).

        s = exp(mean over the row's tokens of (logprobs - old_logprobs))
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))    on each of the row's tokens

    The paper's objective aggregates this loss with "sequence_mean_token_mean". The gradient is that of the paper's
    GSPO-token: the ratio of token t is stop_gradient(s) pi_t / stop_gradient(pi_t). Its value is s, and it has a derivative
    only with respect to the token's own log-probability. If all tokens of a row share one advantage, every mode that weights
    a row's tokens equally gives the gradient of the formula above (-A s / |y| per token for "sequence_mean_token_mean").
    If the advantages differ, each token's gradient uses its own.

    Args:
      logprobs: real [B, N], log-probabilities of the sampled tokens under the policy in training.
      old_logprobs: real [B, N], under the policy that sampled them; no gradient flows into it.
      advantages: real [B, N], usually constant in a row (`groups.broadcast_to_tokens`); no gradient flows into it.
      clip_low: scalar in [0, 1].
      clip_high: scalar, not negative. The range is narrower than PPO's by orders of magnitude: s is a geometric mean.
      mask: bool, int or float [B, N], or None.

    Returns:
      (loss, stats): loss float32 [B, N]; `stats.ratio` is s on each token of the row; `approx_kl` is per token.

    Raises:
      ValueError: the shapes differ or are not [B, N], or a clip is outside its range.
    """
    mask, log_ratio, advantages = _prepare(logprobs, old_logprobs, advantages, clip_low, clip_high, mask)
    require_shape("logprobs", logprobs, "[B, N]", (None, None))
    sequence = jnp.where(mask, masked_mean(log_ratio, mask, axis=1)[:, None], 0)
    # The difference is exactly 0; it only contributes the derivative.
    ratio = jnp.exp(jax.lax.stop_gradient(sequence) + (log_ratio - jax.lax.stop_gradient(log_ratio)))
    loss, clipped = _clip(ratio, advantages, clip_low, clip_high)
    return loss, _stats(ratio, clipped, log_ratio)


def cispo(
    logprobs: Any,
    old_logprobs: Any,
    advantages: Any,
    clip_low: Any = 1.0,
    clip_high: Any = 4.0,
    mask: Any = None,
) -> tuple[jax.Array, SurrogateStats]:
    """CISPO: the plain policy gradient with clipped importance weights, so no token loses its gradient (arXiv 2506.13585).

        loss = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs

    Only the gradient is meaningful: the value of the loss depends on the level of the log-probabilities.

    Args:
      logprobs: real, any shape, usually [B, N]; log-probabilities of the sampled tokens under the policy in training.
      old_logprobs: the same shape, under the policy that sampled them; no gradient flows into it.
      advantages: the same shape; no gradient flows into it.
      clip_low: scalar in [0, 1]; 1 means no lower bound, as in the paper.
      clip_high: scalar, not negative: weights are at most 1 + clip_high. The paper tunes it but gives no value.
      mask: bool, int or float of that shape, or None.

    Returns:
      (loss, stats): loss float32 of that shape.

    Raises:
      ValueError: the shapes differ, or a clip is outside its range.
    """
    mask, log_ratio, advantages = _prepare(logprobs, old_logprobs, advantages, clip_low, clip_high, mask)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -weight * advantages * jnp.maximum(jnp.where(mask, as_float("logprobs", logprobs), 0), -LARGE)
    return loss, _stats(ratio, weight != ratio, log_ratio)


def policy_gradient(logprobs: Any, advantages: Any, mask: Any = None) -> jax.Array:
    """REINFORCE: -A logprobs, whose gradient is the policy gradient on the policy's own samples (Williams 1992).

    Args:
      logprobs: real, any shape, usually [B, N]; log-probabilities of the sampled tokens under the policy in training.
      advantages: the same shape; no gradient flows into it.
      mask: bool, int or float of that shape, or None.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: the shapes differ.
    """
    mask = jnp.ones(shape_of("logprobs", logprobs), bool) if mask is None else is_set(mask)
    require_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    advantages = jnp.where(mask, jax.lax.stop_gradient(as_float("advantages", advantages)), 0)
    return -advantages * jnp.maximum(jnp.where(mask, as_float("logprobs", logprobs), 0), -LARGE)


class DecoupledStats(NamedTuple):
    """Statistics of `decoupled_surrogate`, per token and without gradient; to be averaged under the mask.

    surrogate: `SurrogateStats` against the proximal policy. weight: float32, proximal over behaviour probability, before the
    cap. capped: bool, the cap lowered the weight.
    """

    surrogate: SurrogateStats
    weight: jax.Array
    capped: jax.Array


def decoupled_surrogate(
    logprobs: Any,
    proximal_logprobs: Any,
    behaviour_logprobs: Any,
    advantages: Any,
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    weight_cap: Any = 2.0,
    mask: Any = None,
) -> tuple[jax.Array, DecoupledStats]:
    """PPO with three policies, for samples that are several updates old (AReaL, arXiv 2505.24298; arXiv 2110.00641).

        w = min(pi_proximal / pi_behaviour, weight_cap),    ratio = pi / pi_proximal
        loss = w max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    The trust region is around a recent policy, not around the sampling policy. If the proximal policy is the behaviour
    policy, this is `clipped_surrogate`.

    Args:
      logprobs: real [B, N], log-probabilities of the sampled tokens under the policy in training.
      proximal_logprobs: real [B, N], under the policy at the start of this update; no gradient flows into it.
      behaviour_logprobs: real [B, N], under the policy that sampled them; no gradient flows into it.
      advantages: real [B, N]; no gradient flows into it.
      clip_low: scalar in [0, 1].
      clip_high: scalar, not negative.
      weight_cap: scalar above 0; None for no cap.
      mask: bool, int or float [B, N], or None.

    Returns:
      (loss, stats): loss float32 [B, N].

    Raises:
      ValueError: the shapes differ or are not [B, N], a clip is outside its range, or the cap is not above 0.
    """
    mask = jnp.ones(shape_of("logprobs", logprobs), bool) if mask is None else mask
    require_same_shape(
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        mask=mask,
    )
    if weight_cap is None:
        weight_cap = jnp.inf
    else:
        require_positive_scalar("weight_cap", weight_cap)
    surrogate, stats = clipped_surrogate(logprobs, proximal_logprobs, advantages, clip_low, clip_high, mask)
    weights, weight_stats = importance_weights(proximal_logprobs, behaviour_logprobs, mask, high=weight_cap)
    return weights * surrogate, DecoupledStats(stats, weight_stats.ratio, weight_stats.outside)


def _prepare(
    logprobs: Any, old_logprobs: Any, advantages: Any, clip_low: Any, clip_high: Any, mask: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks and masks the arguments of the clipped losses. -> (bool mask, log ratio, advantages), 0 where masked."""
    mask = jnp.ones(shape_of("logprobs", logprobs), bool) if mask is None else is_set(mask)
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    for name, clip, high in (("clip_low", clip_low, 1), ("clip_high", clip_high, jnp.inf)):
        require_scalar(name, clip, 0, high)
    old_logprobs = jax.lax.stop_gradient(as_float("old_logprobs", old_logprobs))
    advantages = jax.lax.stop_gradient(as_float("advantages", advantages))
    # Masked and limited before `exp`: a 0 cotangent times an infinite derivative is NaN.
    log_ratio = jnp.where(mask, as_float("logprobs", logprobs) - old_logprobs, 0)
    log_ratio = jnp.clip(log_ratio, -LARGE, LOG_RATIO_LIMIT)
    return mask, log_ratio, jnp.where(mask, advantages, 0)


def _clip(ratio: jax.Array, advantages: jax.Array, clip_low: Any, clip_high: Any) -> tuple[jax.Array, jax.Array]:
    """-> (the larger of the plain and the clipped loss; bool, where that is the clipped one)."""
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(plain, bounded), bounded > plain


def _stats(ratio: jax.Array, clipped: jax.Array, log_ratio: jax.Array) -> SurrogateStats:
    # KL(old || new) on samples of the old policy: k3 with d = log old - log new = -log_ratio.
    return jax.lax.stop_gradient(SurrogateStats(ratio, clipped, jnp.expm1(log_ratio) - log_ratio))
