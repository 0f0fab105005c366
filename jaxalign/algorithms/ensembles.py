"""One score from the scores of an ensemble of reward models: less trust where its members disagree.

The members are one architecture with K parameter pytrees, stacked leaf by leaf on a new leading axis, and the batch goes
through them in one batched forward: `jax.vmap(scores_of, in_axes=(0, None, None))(stacked, tokens, length)`, which gives
float32 [K, B]. Members that were trained apart differ in level and scale: bring each to mean 0 and standard deviation 1 on
the same samples (`rewards.score_statistics`, `rewards.normalise_scores`) before they are combined.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import as_float, is_set, require_choice, require_range, require_shape

COMBINATIONS = ("mean", "min", "mean_minus_std")


def combine(scores_KxB: Any, how: str = "mean", k: Any = 1.0, mask: Any = None) -> jax.Array:
    """The members' scores as one: their mean, their minimum, or their mean less k standard deviations.

    The minimum and the deviation are the conservative ones (Coste et al. 2023, arXiv 2310.02743, section 3, where the
    variance is taken off and not its root; Eisenstein et al. 2023, arXiv 2312.09244): what one member has wrongly learnt to
    like, the others do not reward.

    Args:
      scores_KxB: real [K, B], K members' scores of B responses. A NaN in a counted row makes that row NaN.
      how: one of `COMBINATIONS`.
      k: scalar, not negative; for "mean_minus_std", whose deviation divides by K; not read by the others.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      float32 [B]; 0 for masked rows.

    Raises:
      ValueError: a shape differs, no members, one member for "mean_minus_std", an unknown combination, or a negative k.
    """
    require_choice("how", how, COMBINATIONS)
    require_shape("scores_KxB", scores_KxB, "[K, B]", (None, None))
    members, batch = jnp.shape(scores_KxB)
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
    require_shape("k", k, "scalar", ())
    require_range("k", k, 0)
    variance = jnp.mean((scores - mean[None, :]) ** 2, axis=0)
    # The inner `where` keeps the root's gradient finite where the members agree; a NaN variance goes through.
    return mean - k * jnp.where(variance == 0, 0, jnp.sqrt(jnp.where(variance == 0, 1, variance)))
