"""Losses of the preference (reward) model: on pairs of scores, and on single target scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_positive_scalar,
    require_range,
    require_same_shape,
    require_scalar,
    shape_of,
)


def bradley_terry(
    score_a: Any, score_b: Any, label: Any, centering_coef: Any = 0.0, margin: Any = None, mask: Any = None
) -> jax.Array:
    """Cross-entropy of a soft label with the softmax of two scores, plus a penalty on the square of their sum.

        loss = -label log sigmoid(a - b - margin) - (1 - label) log sigmoid(b - a - margin) + centering_coef (a + b)^2

    Pairs determine only the difference of two scores, so their level drifts; the last term centres it (Eisenstein et al.
    2023, arXiv 2312.09244). Soft labels: Lee et al. 2023 (arXiv 2309.00267). The margin is the required gap between the better
    and the worse score, for example the strength of the annotator's preference (Llama 2, arXiv 2307.09288, eq. 2).

    Args:
      score_a: real, any shape, usually [B].
      score_b: the same shape.
      label: the same shape, in [0, 1]: the probability that the first is better.
      centering_coef: scalar, not negative.
      margin: scalar or the same shape, not negative, in units of the score; None for none.
      mask: bool, int or float of that shape; 0 for padding, which has loss 0 and no gradient, whatever its values. None
        counts all.

    Returns:
      float32 of that shape, in nats.

    Raises:
      ValueError: the shapes differ, a label is outside [0, 1], or the coefficient or a margin is negative.
    """
    require_same_shape(score_a=score_a, score_b=score_b, label=label)
    require_scalar("centering_coef", centering_coef, 0)
    # Checked before any computation: under `jit` a guard cannot read computed values.
    require_range("label", label if mask is None else _select("label", label, mask), 0, 1)
    score_a, score_b = _select("score_a", score_a, mask), _select("score_b", score_b, mask)
    label = _select("label", label, mask)
    if margin is None:
        first, second = score_a - score_b, score_b - score_a
    else:
        if shape_of("margin", margin):
            require_same_shape(score_a=score_a, margin=margin)
            margin = margin if mask is None else _select("margin", margin, mask)
        require_range("margin", margin, 0)
        margin = as_float("margin", margin)
        first, second = score_a - score_b - margin, score_b - score_a - margin
    cross_entropy = -label * jax.nn.log_sigmoid(first) - (1 - label) * jax.nn.log_sigmoid(second)
    loss = cross_entropy + centering_coef * (score_a + score_b) ** 2
    return _select("loss", loss, mask)


def score_regression(scores: Any, targets: Any, mask: Any = None, huber_delta: Any = None) -> jax.Array:
    """The error of a score against its target: a rating, or another model's score (distillation).

        squared  (scores - targets)^2
        Huber    e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2),    e = scores - targets

    Both follow common usage, so at small errors the squared loss is twice the Huber loss.

    Args:
      scores: real, any shape, usually [B].
      targets: the same shape; no gradient flows into it.
      mask: bool, int or float of that shape; 0 for padding, which has loss 0 and no gradient, whatever its values. None
        counts all.
      huber_delta: scalar above 0, in units of the score; None for the squared loss.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: the shapes differ, or `huber_delta` is not above 0.
    """
    require_same_shape(scores=scores, targets=targets)
    targets = jax.lax.stop_gradient(_select("targets", targets, mask))
    error = _select("scores", scores, mask) - targets
    if huber_delta is None:
        return error**2
    require_positive_scalar("huber_delta", huber_delta)
    inner = jnp.minimum(jnp.abs(error), huber_delta)
    return inner * (jnp.abs(error) - 0.5 * inner)


def _select(name: str, x: Any, mask: Any) -> jax.Array:
    x = as_float(name, x)
    if mask is None:
        return x
    require_same_shape(**{name: x, "mask": mask})
    return jnp.where(is_set(mask), x, 0)
