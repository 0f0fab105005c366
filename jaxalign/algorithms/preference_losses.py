"""The preference model's loss, per pair."""

from __future__ import annotations

from typing import Any

import jax

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape


def bradley_terry(score_a: Any, score_b: Any, label: Any, centering_coef: Any = 0.0) -> jax.Array:
    """Cross-entropy of a soft label with the softmax of two scores, and a pull of their sum towards 0.

        loss = -label log sigmoid(a - b) - (1 - label) log sigmoid(b - a) + centering_coef (a + b)^2

    Only the difference of two scores is learnt, so their level drifts; the last term centres it (Eisenstein et al.
    2023, arXiv 2312.09244). Soft labels: Lee et al. 2023 (arXiv 2309.00267).

    Args:
      score_a: real, any shape, usually [B].
      score_b: the same shape.
      label: the same shape, in [0, 1]: the probability that the first is better.
      centering_coef: scalar, not negative.

    Returns:
      float32 of that shape, in nats.

    Raises:
      ValueError: the shapes differ, a label is outside [0, 1], or a negative coefficient.
    """
    require_same_shape(score_a=score_a, score_b=score_b, label=label)
    require_shape("centering_coef", centering_coef, "scalar", ())
    require_range("label", label, 0, 1)
    require_range("centering_coef", centering_coef, 0)
    score_a, score_b, label = as_float("score_a", score_a), as_float("score_b", score_b), as_float("label", label)
    margin = score_a - score_b
    cross_entropy = -label * jax.nn.log_sigmoid(margin) - (1 - label) * jax.nn.log_sigmoid(-margin)
    return cross_entropy + centering_coef * (score_a + score_b) ** 2
