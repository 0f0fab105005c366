"""Turns scores of responses into rewards per token: combining, normalising, length and KL penalties, placement on tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_choice,
    require_positive_scalar,
    require_range,
    require_same_shape,
    require_scalar,
    require_shape,
    shape_of,
)
from jaxalign.algorithms.masked import masked_mean, masked_variance

MISSING_EOS = ("none", "replace", "penalty", "zero")


def score_statistics(scores: Any, mask: Any = None) -> tuple[jax.Array, jax.Array]:
    """The (shift, scale) for `normalise_scores` that gives `scores` mean 0 and standard deviation 1.

    Measure it on samples of the policy that RL starts from (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
      scores: real [B].
      mask: bool, int or float [B], the scores to count; None counts all.

    Returns:
      (mean, standard deviation): float32 scalars. The scale is 1 where the scores do not differ.

    Raises:
      ValueError: the shapes differ.
    """
    scores = as_float("scores", scores)
    mask = jnp.ones_like(scores) if mask is None else mask
    variance = masked_variance(scores, mask)
    return masked_mean(scores, mask), jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 1)


def normalise_scores(scores: Any, shift: Any, scale: Any, clip: Any = None) -> jax.Array:
    """(scores - shift) / scale, then clipped to [-clip, clip] unless `clip` is None.

    An infinite score stays infinite, so that it does not pass for the best or the worst finite one.

    Args:
      scores: real, any shape, usually [B].
      shift: scalar.
      scale: scalar above 0.
      clip: scalar, not negative, in units of the normalised score; None: no clipping.

    Returns:
      float32 of the shape of `scores`.

    Raises:
      ValueError: `scale` is not above 0, `clip` is negative, or a setting is not a scalar.
    """
    require_shape("shift", shift, "scalar", ())
    require_positive_scalar("scale", scale)
    normalised = (as_float("scores", scores) - shift) / scale
    if clip is None:
        return normalised
    require_scalar("clip", clip, 0)
    return jnp.where(jnp.isinf(normalised), normalised, jnp.clip(normalised, -clip, clip))


def combine_scores(scores: Any, weights: Any, mask: Any = None) -> tuple[jax.Array, jax.Array]:
    """Combines several scores of each response into their weighted sum, where all of them are present.

    A missing score (masked or not finite, because a reward function failed or returned NaN) drops its row: the sum of the
    other scores is on another level and would look better or worse. Scores of weight 0 may be missing. The caller must mask
    and count the dropped rows.

    Args:
      scores: real [K, B], of K rewards.
      weights: real [K], finite; negative for scores to minimise. They are not normalised.
      mask: bool, int or float [K, B]; 0 where a score is missing. None: all are present.

    Returns:
      (combined, kept): float32 [B], 0 in dropped rows, and bool [B].

    Raises:
      ValueError: a shape differs, or a weight is not finite.
    """
    mask = jnp.ones(shape_of("scores", scores), bool) if mask is None else is_set(mask)
    require_same_shape(scores=scores, mask=mask)
    require_shape("scores", scores, "[K, B]", (None, None))
    require_shape("weights", weights, "[K]", shape_of("scores", scores)[:1])
    largest = float(jnp.finfo(jnp.float32).max)
    require_range("weights", weights, -largest, largest)
    scores, weights = as_float("scores", scores), as_float("weights", weights)[:, None]
    present = mask & jnp.isfinite(scores)
    kept = jnp.all(present | (weights == 0), axis=0)
    combined = jnp.sum(weights * jnp.where(present, scores, 0), axis=0)
    return jnp.where(kept, combined, 0), kept


def length_penalty(length: Any, coef: Any, free: Any = 0) -> jax.Array:
    """-coef for every token after the first `free`, to be added to a score.

    Args:
      length: int or real, any shape, usually [B], in tokens, not negative.
      coef: scalar, not negative, in units of the score.
      free: scalar, not negative: tokens that cost nothing.

    Returns:
      float32 of the shape of `length`, at most 0.

    Raises:
      ValueError: an argument is negative, or a setting is not a scalar.
    """
    for name, value in (("coef", coef), ("free", free)):
        require_scalar(name, value, 0)
    require_range("length", length, 0)
    return -coef * jnp.maximum(as_float("length", length) - free, 0)


def overlong_penalty(length: Any, max_length: Any, buffer: Any) -> jax.Array:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, section 3.4), to be added to a score.

    0 up to max_length - buffer tokens, then decreasing linearly to -1 at max_length, and -1 beyond.

    Args:
      length: int or real, any shape, usually [B], in tokens, not negative.
      max_length: scalar, in tokens.
      buffer: scalar above 0, at most `max_length`: the tokens over which the penalty grows.

    Returns:
      float32 of the shape of `length`, in [-1, 0].

    Raises:
      ValueError: a length is negative, `buffer` is not above 0 or exceeds `max_length`, or a setting is not a scalar.
    """
    for name, value in (("max_length", max_length), ("buffer", buffer)):
        require_positive_scalar(name, value)
    require_range("max_length - buffer", max_length - buffer, 0)
    require_range("length", length, 0)
    return jnp.clip((max_length - buffer - as_float("length", length)) / buffer, -1, 0)


def shape_rewards(
    scores: Any,
    kl: Any,
    kl_coef: Any,
    response_length: Any,
    ended: Any,
    missing_eos: str = "none",
    missing_eos_value: Any = None,
) -> jax.Array:
    """Rewards per token: -kl_coef * kl on every token of the response, plus the score on the last one or a score on each.

    The last token is found by length, not by token id: it is the stop token if one was sampled, else the last token before
    the cut. Only the score is subject to the missing-eos rule; the KL penalty always applies.

    Args:
      scores: real [B], one score per response, or [B, N], one per token; integers are cast to float32.
      kl: real [B, N], per-token estimates (`kl.kl_penalty`); entries past the response are not read.
      kl_coef: scalar, not negative.
      response_length: int [B], in 0..N; a row of length 0 has no tokens and no reward.
      ended: bool [B], True if a stop token was sampled.
      missing_eos: the rule for the score of a response that did not end: "none" keeps it, "replace" replaces it by
        `missing_eos_value`, "penalty" subtracts `missing_eos_value` (not negative), "zero" sets it to 0. For scores per
        token, "replace" and "zero" remove the scores of all tokens, "replace" then puts the value on the last token, and
        "penalty" subtracts it there.
      missing_eos_value: scalar; only "replace" and "penalty" read it, and they need it.

    Returns:
      float32 [B, N], 0 past the response.

    Raises:
      ValueError: a shape differs, the rule is unknown, its value is missing or (for "penalty") negative, or a length is
        outside 0..N.
    """
    require_shape("kl", kl, "[B, N]", (None, None))
    batch, length = shape_of("kl", kl)
    per_token = len(shape_of("scores", scores)) == 2
    require_shape("scores", scores, *(("[B, N]", (batch, length)) if per_token else ("[B]", (batch,))))
    require_shape("response_length", response_length, "[B]", (batch,))
    require_same_shape(response_length=response_length, ended=ended)
    require_scalar("kl_coef", kl_coef, 0)
    require_range("response_length", response_length, 0, length)

    scores, ended = as_float("scores", scores), jnp.asarray(ended) != 0
    position = jnp.arange(length)[None, :]
    lengths = jnp.asarray(response_length)[:, None]
    penalty = jnp.where(position < lengths, -kl_coef * as_float("kl", kl), 0)
    last = position == lengths - 1
    if not per_token:
        scores = _missing_eos(scores, ended, missing_eos, missing_eos_value)
        return penalty + jnp.where(last, scores[:, None], 0)
    none = jnp.zeros(batch, scores.dtype)
    on_last = _missing_eos(none, ended, missing_eos, missing_eos_value)  # Added to the last token's own score.
    removed = missing_eos in ("replace", "zero")
    tokens = jnp.where((position < lengths) & (ended[:, None] | (not removed)), scores, 0)
    return penalty + tokens + jnp.where(last, on_last[:, None], 0)


def _missing_eos(scores: jax.Array, ended: jax.Array, rule: str, value: Any) -> jax.Array:
    require_choice("missing_eos", rule, MISSING_EOS)
    if rule == "none":
        return scores
    if rule == "zero":
        return jnp.where(ended, scores, 0)
    if value is None:
        raise ValueError(f"missing_eos is {rule!r}, which needs a missing_eos_value")
    require_shape("missing_eos_value", value, "scalar", ())
    if rule == "replace":
        return jnp.where(ended, scores, value)
    require_range("missing_eos_value (subtracted by the rule 'penalty')", value, 0)
    return jnp.where(ended, scores, scores - value)
