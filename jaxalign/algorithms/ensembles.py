"""Combines the scores of an ensemble of reward models into one score, optionally lower where the members disagree.

The members share one architecture. Their K parameter pytrees are stacked leaf by leaf on a new leading axis, and one batched
forward pass scores the batch with all of them: `jax.vmap(scores_of, in_axes=(0, None, None))(stacked, tokens, length)`,
which gives float32 [K, B]. Separately trained members differ in level and scale: normalise each to mean 0 and standard
deviation 1 on the same samples (`rewards.score_statistics`, `rewards.normalise_scores`) before you combine them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.guards import as_float, is_set, require_choice, require_range, require_scalar, require_shape

COMBINATIONS = ("mean", "min", "mean_minus_std")


def combine(scores_KxB: Any, how: str = "mean", k: Any = 1.0, mask: Any = None) -> jax.Array:
    """Combines the members' scores: their mean, their minimum, or their mean minus k standard deviations.

    The minimum and the mean minus the deviation are conservative (Coste et al. 2023, arXiv 2310.02743, section 3, which
    subtracts the variance, not its root; Eisenstein et al. 2023, arXiv 2312.09244): a response that only one member
    overrates gets a lower combined score.

    Args:
      scores_KxB: real [K, B], K members' scores of B responses. A NaN in a counted row makes that row NaN.
      how: one of `COMBINATIONS`.
      k: scalar, not negative; only "mean_minus_std" reads it. Its standard deviation divides by K, not K - 1.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      float32 [B]; 0 for masked rows.

    Raises:
      ValueError: a shape differs, there are no members (or only one for "mean_minus_std"), `how` is unknown, or k is negative.
    """
    require_choice("how", how, COMBINATIONS)
    require_shape("scores_KxB", scores_KxB, "[K, B]", (None, None))
    members, batch = np.shape(scores_KxB)
    require_range("K, the members of scores_KxB,", members, 2 if how == "mean_minus_std" else 1)
    scores = as_float("scores_KxB", scores_KxB)
    if mask is not None:
        require_shape("mask", mask, "[B]", (batch,))
        scores = jnp.where(is_set(mask)[None, :], scores, 0)
    if how == "min":
        return jnp.min(scores, axis=0)
    mean = jnp.mean(scores, axis=0)
    if how == "mean":
        return mean
    require_scalar("k", k, 0)
    variance = jnp.mean((scores - mean[None, :]) ** 2, axis=0)
    # The inner `where` keeps the gradient of the square root finite where the members agree; a NaN variance propagates.
    return mean - k * jnp.where(variance == 0, 0, jnp.sqrt(jnp.where(variance == 0, 1, variance)))
