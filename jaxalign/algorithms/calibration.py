"""How far a predicted probability can be trusted: reliability bins and the expected calibration error."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape
from jaxalign.algorithms.masked import masked_mean


class ReliabilityBins(NamedTuple):
    """A calibration plot: K equal bins of the predicted probability.

    edges: float32 [K + 1], 0 to 1. confidence: float32 [K], mean prediction. accuracy: float32 [K], share of positive
    outcomes. count: float32 [K]. Empty bins hold 0 in all three.
    """

    edges: jax.Array
    confidence: jax.Array
    accuracy: jax.Array
    count: jax.Array


def reliability_bins(prob: Any, label: Any, bins: int = 10, mask: Any = None) -> ReliabilityBins:
    """Predictions sorted into equal bins of [0, 1], each with its mean prediction and its share of positive outcomes.

    A bin holds its lower edge; the last one also its upper.

    Args:
      prob: real [B], in [0, 1], the predicted probability of the positive outcome.
      label: real [B], in [0, 1]; the outcome is positive where label > .5, so mask out even labels, which have none.
      bins: how many, at least 1.
      mask: bool, int or float [B], the predictions that count; None counts all.

    Returns:
      A `ReliabilityBins`.

    Raises:
      ValueError: the shapes differ or are not [B], a value is outside [0, 1], or bins below 1.
    """
    mask = jnp.ones(jnp.shape(prob)) if mask is None else as_float("mask", mask)
    require_same_shape(prob=prob, label=label, mask=mask)
    require_shape("prob", prob, "[B]", (None,))
    require_range("prob", prob, 0, 1)
    require_range("label", label, 0, 1)
    require_range("bins", bins, 1)
    prob, positive = as_float("prob", prob), as_float("label", label) > 0.5
    # Divided on the host: the nearest float to k / K, so that a prediction of .9 meets the edge .9, not an ulp above.
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
