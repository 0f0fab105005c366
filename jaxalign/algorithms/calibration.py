"""Calibration of predicted probabilities: reliability bins, the expected calibration error, and temperature scaling."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.guards import as_float, require_positive, require_range, require_same_shape, require_shape
from jaxalign.algorithms.masked import masked_mean

# Bisection steps on log T: enough to go from any bracket to two neighbouring float32 numbers.
_HALVINGS = 40


class ReliabilityBins(NamedTuple):
    """A calibration plot: K equal bins of the predicted probability.

    edges: float32 [K + 1], 0 to 1. confidence: float32 [K], mean prediction. accuracy: float32 [K], share of positive
    outcomes. count: float32 [K]. All three are 0 for empty bins.
    """

    edges: jax.Array
    confidence: jax.Array
    accuracy: jax.Array
    count: jax.Array


def reliability_bins(prob: Any, label: Any, bins: int = 10, mask: Any = None) -> ReliabilityBins:
    """Sorts predictions into equal bins of [0, 1]; gives each bin's mean prediction and share of positive outcomes.

    A bin includes its lower edge; the last bin also includes its upper edge.

    Args:
      prob: real [B], in [0, 1], the predicted probability of the positive outcome.
      label: real [B], in [0, 1]; the outcome is positive where label > .5. Mask out labels of .5, which have no outcome.
      bins: the number of bins, at least 1.
      mask: bool, int or float [B], the predictions that count; None counts all.

    Returns:
      A `ReliabilityBins`.

    Raises:
      ValueError: the shapes differ or are not [B], a value is outside [0, 1], or bins is below 1.
    """
    require_same_shape(prob=prob, label=label, mask=prob if mask is None else mask)
    require_shape("prob", prob, "[B]", (None,))
    require_range("bins", bins, 1)
    # Checked before any computation: under `jit` a guard cannot read computed values.
    if mask is None:
        mask = jnp.ones(np.shape(prob))
    else:
        mask = as_float("mask", mask)
        prob, label = (jnp.where(mask != 0, as_float(name, x), 0) for name, x in (("prob", prob), ("label", label)))
    require_range("prob", prob, 0, 1)
    require_range("label", label, 0, 1)
    prob, positive = as_float("prob", prob), as_float("label", label) > 0.5
    # Divided on the host to get the nearest float to k / K: a prediction of .9 must equal the edge .9, not miss it by an ulp.
    edges = jnp.asarray(np.arange(bins + 1) / bins, prob.dtype)
    index = jnp.clip(jnp.searchsorted(edges, prob, side="right") - 1, 0, bins - 1)
    member = (index[None, :] == jnp.arange(bins)[:, None]) * mask[None, :]
    shape = member.shape
    confidence = masked_mean(jnp.broadcast_to(prob[None, :], shape), member, axis=1)
    accuracy = masked_mean(jnp.broadcast_to(positive[None, :], shape), member, axis=1)
    return ReliabilityBins(edges, confidence, accuracy, jnp.sum(member, axis=1))


def expected_calibration_error(prob: Any, label: Any, bins: int = 10, mask: Any = None) -> jax.Array:
    """Mean of |accuracy - confidence| over the bins, weighted by count (Guo et al. 2017, arXiv 1706.04599, eq. 3).

    Arguments and errors as in `reliability_bins`.

    Returns:
      float32 scalar in [0, 1]; 0 where nothing counts.
    """
    _, confidence, accuracy, count = reliability_bins(prob, label, bins, mask)
    return masked_mean(jnp.abs(accuracy - confidence), count)


def fit_temperature(margin: Any, label: Any, mask: Any = None, low: float = 1e-3, high: float = 1e3) -> jax.Array:
    """The temperature T that maximises the likelihood of sigmoid(margin / T) (Guo et al. 2017, arXiv 1706.04599, section 4.2).

    Fitted on held-out pairs, it changes no ranking: `expected_calibration_error(sigmoid(margin / T), label)` on other
    pairs measures the improvement. The cross-entropy is convex in 1 / T, and bisection in log T uses only the sign of its
    slope, so it cannot diverge.

    Args:
      margin: real [B], the score of the first response minus that of the second.
      label: real [B], in [0, 1]: the probability that the first is better; soft labels are not rounded.
      mask: bool, int or float [B], the pairs that count; None counts all.
      low: above 0, the lowest temperature. It is returned where every pair is ranked correctly, since the likelihood then
        increases without bound as T falls.
      high: above `low`, the highest temperature, returned where the margins are uninformative or contradict the labels.

    Returns:
      float32 scalar without gradient; 1 where no pair counts or all margins are 0.

    Raises:
      ValueError: the shapes differ or are not [B], a label is outside [0, 1], or not 0 < low < high.
    """
    require_shape("margin", margin, "[B]", (None,))
    if mask is None:
        # Checked before any computation: under `jit` a guard cannot read computed values.
        require_range("label", label, 0, 1)
        mask = jnp.ones(np.shape(margin))
    require_same_shape(margin=margin, label=label, mask=mask)
    mask = as_float("mask", mask)
    label = jnp.where(mask != 0, as_float("label", label), 0)
    require_range("label", label, 0, 1)
    require_positive("low", low)
    require_positive("high - low", high - low)
    margin = jax.lax.stop_gradient(jnp.where(mask != 0, as_float("margin", margin), 0))
    label = jax.lax.stop_gradient(label.astype(margin.dtype))
    # Scaled by the largest margin so that the slope's sum does not overflow; its sign is unchanged.
    unit = jnp.max(jnp.abs(margin), initial=0)
    scaled = margin / jnp.where(unit > 0, unit, 1)

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = 0.5 * (bracket[0] + bracket[1])
        logit = margin * jnp.exp(-middle)
        # sigmoid(logit) - label, written as two terms: the difference of two numbers near 1 loses precision.
        error = (1 - label) * jax.nn.sigmoid(logit) - label * jax.nn.sigmoid(-logit)
        too_cold = jnp.sum(mask * scaled * error) > 0
        return jnp.where(too_cold, middle, bracket[0]), jnp.where(too_cold, bracket[1], middle)

    bounds = tuple(jnp.log(jnp.asarray(bound, margin.dtype)) for bound in (low, high))
    low_end, high_end = jax.lax.fori_loop(0, _HALVINGS, halve, bounds)
    # Where one end of the bracket never moved, return that bound itself: the other end stops an ulp away.
    temperature = jnp.where(low_end == bounds[0], low, jnp.where(high_end == bounds[1], high, jnp.exp(low_end)))
    return jnp.where(unit > 0, temperature, 1).astype(margin.dtype)
