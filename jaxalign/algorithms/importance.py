"""Importance weights that correct for samples from another policy: an older one, or a sampler with other numerics."""

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

# A weight beyond e^60 only shows that the policies have nothing in common, and sums of it would overflow float32.
LOG_RATIO_LIMIT = 60.0


class ImportanceStats(NamedTuple):
    """Per token and without gradient; to be averaged under the mask.

    ratio: float32, the weight before clipping. outside: bool, clipping changed it.
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
    """Weights policy / behaviour, bounded, to multiply per-token losses by. No gradient flows into or out of them.

    With d = logprobs - behaviour_logprobs, summed and averaged over a row's unmasked tokens:

        "token"      exp(d_t)       each token's own; low variance, biased: it ignores the prefix
        "sequence"   exp(sum d)     unbiased for the whole response; its variance grows with the length
        "geometric"  exp(mean d)    the length-normalised ratio: a measure of drift more than a correction

    "truncate" clips them to [low, high] (truncated importance sampling); "mask" makes those outside 0, which drops the
    token, or at the other levels the whole response.

    Args:
      logprobs: real [B, N], under the policy that is trained, or the proximal one.
      behaviour_logprobs: real [B, N], under the policy that sampled.
      mask: bool, int or float [B, N]; not 0 at the tokens that count.
      level: one of `LEVELS`.
      mode: one of `MODES`.
      low: scalar, not negative, at most `high`; 0 for no lower bound.
      high: scalar above 0; inf for no upper bound, though ratios never exceed e^60.

    Returns:
      (weights, stats): weights float32 [B, N], 0 at masked tokens; the statistics are 1 and False there.

    Raises:
      ValueError: a shape differs, an unknown level or mode, or bounds outside their range.
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
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2); 1 where all weights are equal.

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
