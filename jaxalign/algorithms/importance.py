"""Importance weights for samples from another policy: an older one, or a sampler with different numerics."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_choice,
    require_positive,
    require_range,
    require_same_shape,
    require_shape,
)
from jaxalign.algorithms.masked import masked_mean, masked_sum

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")

# A weight beyond e^60 carries no information except that the policies are far apart, and sums of it could overflow float32.
LOG_RATIO_LIMIT = 60.0
LARGE = 1e30
"""Replaces an infinite log-ratio: sums and means of several are finite in float32."""


def limit_log_ratio(logprobs: Any, other_logprobs: Any, limit: float | None) -> Any:
    """`logprobs`, moved to at most `limit` nats from `other_logprobs`, so that functions of the exponential stay small.

    Args:
      logprobs: real, any shape. Where it is moved, no gradient flows into it.
      other_logprobs: the same shape.
      limit: scalar above 0; None for no limit.
    """
    return logprobs if limit is None else jnp.clip(logprobs, other_logprobs - limit, other_logprobs + limit)


class ImportanceStats(NamedTuple):
    """Statistics per token and without gradient; to be averaged under the mask.

    ratio: float32, the weight before clipping. outside: bool, the ratio is outside the bounds.
    """

    ratio: jax.Array
    outside: jax.Array


def importance_weights(
    logprobs: Any,
    behaviour_logprobs: Any,
    mask: Any,
    level: str = "token",
    mode: str = "truncate",
    low: Any = 0.0,
    high: Any = 2.0,
) -> tuple[jax.Array, ImportanceStats]:
    """Bounded weights, policy over behaviour probability, for multiplying per-token losses. No gradient flows through them.

    With d = logprobs - behaviour_logprobs, summed and averaged over a row's unmasked tokens:

        "token"      exp(d_t)       per token; low variance, but biased: it ignores the prefix
        "sequence"   exp(sum d)     unbiased for the whole response; its variance grows with the length
        "geometric"  exp(mean d)    the length-normalised ratio: a measure of drift rather than a correction

    "truncate" clips them to [low, high] (truncated importance sampling). "mask" sets those outside to 0, which drops the
    token, or at the other two levels the whole response.

    Args:
      logprobs: real [B, N], under the policy in training, or the proximal policy.
      behaviour_logprobs: real [B, N], under the policy that sampled them.
      mask: bool, int or float [B, N]; not 0 at the tokens that count.
      level: one of `LEVELS`.
      mode: one of `MODES`.
      low: scalar in [0, high]; 0 for no lower bound.
      high: scalar above 0; inf for no upper bound, though ratios never exceed e^60.

    Returns:
      (weights, stats): weights float32 [B, N], 0 at masked tokens; the statistics are 1 and False there.

    Raises:
      ValueError: a shape differs, the level or mode is unknown, or a bound is outside its range.
    """
    require_choice("level", level, LEVELS)
    require_choice("mode", mode, MODES)
    require_same_shape(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask)
    require_shape("logprobs", logprobs, "[B, N]", (None, None))
    for name, bound in (("low", low), ("high", high)):
        require_shape(name, bound, "scalar", ())
    require_range("low", low, 0)
    require_positive("high", high)
    require_range("high - low", high - low, 0)

    selected = is_set(mask)
    difference = as_float("logprobs", logprobs) - as_float("behaviour_logprobs", behaviour_logprobs)
    log_ratio = jax.lax.stop_gradient(jnp.where(selected, difference, 0))
    if level != "token":
        reduce = masked_sum if level == "sequence" else masked_mean
        log_ratio = jnp.where(selected, reduce(log_ratio, selected, axis=1)[:, None], 0)
    ratio = jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_LIMIT))
    outside = selected & ((ratio < low) | (ratio > high))
    bounded = jnp.clip(ratio, low, high) if mode == "truncate" else jnp.where(outside, 0, ratio)
    return jnp.where(selected, bounded, 0), ImportanceStats(ratio, outside)


def effective_sample_share(weights: Any, mask: Any) -> jax.Array:
    """Kish's effective sample size divided by the number of samples: (sum w)^2 / (n sum w^2); 1 if all weights are equal.

    Args:
      weights: real, any shape, not negative. Where all tokens of a row share a weight, pass one per row ([B]).
      mask: bool, int or float of that shape; not 0 at the samples that count.

    Returns:
      float32 scalar in [0, 1]; 0 where nothing counts or all weights are 0.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(weights=weights, mask=mask)
    selected = is_set(mask)
    weights = jnp.where(selected, as_float("weights", weights), 0)
    # Scaled by the largest weight so that the squares do not overflow.
    largest = jnp.max(weights, initial=0)
    weights = weights / jnp.where(largest > 0, largest, 1)
    squares = masked_mean(weights**2, selected)
    return jnp.where(squares > 0, masked_mean(weights, selected) ** 2 / jnp.where(squares > 0, squares, 1), 0)
