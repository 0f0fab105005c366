"""Masked statistics, and the aggregation of per-token losses into a scalar.

Under `jit` with sharded arrays every sum here is over the global array, whatever the mesh. The losses of micro-batches add up
to the loss of the batch if `aggregate` receives the global count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.guards import (
    as_float,
    require_axis,
    require_choice,
    require_flag,
    require_positive_scalar,
    require_same_shape,
    require_scalar,
    require_shape,
    shape_of,
)

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant")

# Added to the variance in `whiten`, as in the PPO of Ziegler et al.: equal values whiten to 0, not to NaN.
_VARIANCE_FLOOR = 1e-8


def masked_sum(x: Any, mask: Any, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Sum of `x` where `mask` is set; a fractional mask is a weight.

    Args:
      x: real, any shape; inf and NaN at masked positions affect neither the sum nor its gradient.
      mask: bool, int or float of x's shape, not negative.
      axis: axes to sum over; None sums all.

    Returns:
      float32, the shape of `x` without `axis`; 0 where nothing is selected.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(x=x, mask=mask)
    require_axis("axis", axis, len(shape_of("x", x)))
    mask = as_float("mask", mask)
    return jnp.sum(_select(as_float("x", x), mask) * mask, axis=axis)


def masked_mean(x: Any, mask: Any, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Mean of `x` over the positions where `mask` is set; 0 where none is set. Arguments as in `masked_sum`."""
    total = masked_sum(x, mask, axis)
    return _safe_divide(total, jnp.sum(as_float("mask", mask), axis=axis))


def masked_variance(x: Any, mask: Any, unbiased: bool = False) -> jax.Array:
    """Variance of `x` over all positions where `mask` is set.

    Args:
      x: real, any shape.
      mask: bool, int or float of x's shape.
      unbiased: divide by the count minus one (Bessel) instead of the count.

    Returns:
      float32 scalar; 0 where the divisor would be 0.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(x=x, mask=mask)
    _, centred = _centre(x, mask)
    count = jnp.sum(as_float("mask", mask))
    return _safe_divide(masked_sum(centred**2, mask), count - 1 if unbiased else count)


def whiten(x: Any, mask: Any, shift_mean: bool = True, unbiased: bool = False) -> jax.Array:
    """Scales `x` to variance 1 over all positions where `mask` is set, and shifts it to mean 0 unless `shift_mean` is False.

    Call it on the whole minibatch, before the split into micro-batches: the statistics must be global.

    Args:
      x: real [B, T].
      mask: bool, int or float [B, T].
      shift_mean: False adds the mean back after scaling (as Ziegler et al. 2019 do for rewards).
      unbiased: use the Bessel-corrected variance.

    Returns:
      float32 [B, T], 0 at masked positions.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(x=x, mask=mask)
    require_flag("shift_mean", shift_mean)
    require_flag("unbiased", unbiased)
    mean, centred = _centre(x, mask)
    whitened = centred * jax.lax.rsqrt(masked_variance(x, mask, unbiased) + _VARIANCE_FLOOR)
    return _select(whitened if shift_mean else whitened + mean, as_float("mask", mask))


def aggregate_total(mask: Any, mode: str = "token_mean", max_length: Any = None) -> jax.Array:
    """The count that `aggregate` divides by.

    For "token_mean" it is the number of tokens; for the other modes the number of sequences with at least one token, and for
    "token_sum_constant" that number times `max_length`. Compute it over the full batch and pass it to `aggregate` as `total`,
    so that the losses of the micro-batches add up to the loss of the batch.

    Args:
      mask: bool, int or float [B, T].
      mode: one of `AGGREGATIONS`.
      max_length: scalar above 0, in tokens; only "token_sum_constant" reads it. None: T, which is correct only if every batch
        is as wide as the longest allowed response.

    Returns:
      float32 scalar.

    Raises:
      ValueError: the mode is unknown, the mask is not [B, T], or `max_length` is not a scalar above 0.
    """
    require_choice("mode", mode, AGGREGATIONS)
    require_shape("mask", mask, "[B, T]", (None, None))
    mask = as_float("mask", mask)
    if mode == "token_mean":
        return jnp.sum(mask)
    sequences = jnp.sum(jnp.any(mask > 0, axis=1).astype(mask.dtype))
    if mode != "token_sum_constant":
        return sequences
    max_length = np.shape(mask)[1] if max_length is None else max_length
    require_positive_scalar("max_length", max_length)
    return sequences * max_length


def aggregate(loss: Any, mask: Any, mode: str = "token_mean", total: Any = None, max_length: Any = None) -> jax.Array:
    """Reduces per-token losses to a scalar.

    "token_mean" weights every token equally. The "sequence_mean" modes take the mean or the sum over each sequence's tokens
    and average that over sequences; a row without tokens is padding and does not count as a sequence (many implementations
    count it as a 0). "token_sum_constant" divides the total by sequences * `max_length`, so that a token has the same weight
    in short and long responses, and in every batch (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    Args:
      loss: real [B, T].
      mask: bool, int or float [B, T].
      mode: one of `AGGREGATIONS`.
      total: scalar, the count of the full batch (`aggregate_total`) where `loss` is one of its micro-batches: their results
        then add up to the loss of the batch. None: `loss` is the full batch.
      max_length: scalar, as in `aggregate_total`; ignored if `total` is given, which already includes it.

    Returns:
      float32 scalar; 0 for an all-zero mask.

    Raises:
      ValueError: the shapes differ or are not [B, T], the mode is unknown, or `total` is negative or not a scalar.
    """
    require_same_shape(loss=loss, mask=mask)
    if total is None:
        total = aggregate_total(mask, mode, max_length)
    require_choice("mode", mode, AGGREGATIONS)
    require_shape("mask", mask, "[B, T]", (None, None))
    require_scalar("total", total, 0)
    if mode == "sequence_mean_token_mean":
        summed = jnp.sum(masked_mean(loss, mask, axis=1))
    else:
        summed = masked_sum(loss, mask)
    return _safe_divide(summed, as_float("total", total))


def _select(x: jax.Array, mask: jax.Array) -> jax.Array:
    # Not `x * mask`: 0 * inf is NaN, in the value and in the gradient.
    return jnp.where(mask != 0, x, jnp.zeros_like(x))


def _safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    # The inner `where` keeps the gradient finite: 0 / 0 has a NaN gradient even where the outer one discards its value.
    positive = denominator > 0
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), jnp.zeros_like(numerator))


def _centre(x: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
    x = _select(as_float("x", x), as_float("mask", mask))
    mean = masked_mean(x, mask)
    # A float32 mean can be off by an ulp; subtracting the mean of the remainder gives exactly 0 for large equal values.
    residue = masked_mean(x - mean, mask)
    return mean, x - mean - residue
