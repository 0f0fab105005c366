"""Advantages from the scores of several responses to one prompt: each group is its own baseline, without a critic.

A batch of B rows has B / group_size groups of contiguous rows. Every function returns one number per row, which
`broadcast_to_tokens` copies to the row's tokens. Mask dropped scores: an unmasked NaN propagates to its whole group.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_choice,
    require_flag,
    require_range,
    require_same_shape,
    require_scalar,
    require_shape,
    shape_of,
)
from jaxalign.algorithms.masked import masked_mean, masked_sum

SCALES = ("std", "none")


def rloo(scores: Any, group_size: int, mask: Any = None) -> jax.Array:
    """Leave-one-out: each score minus the mean of the others in its group (Ahmadian et al. 2024, arXiv 2402.14740).

    Args:
      scores: real [B].
      group_size: responses to one prompt, in contiguous rows, at least 2; a Python int.
      mask: bool, int or float [B]; 0 for padding rows, whose score is not read. None counts all.

    Returns:
      float32 [B]; exactly 0 for masked rows, for the only unmasked row of a group, and for groups of equal scores.

    Raises:
      ValueError: a shape differs, the rows do not divide into groups of `group_size`, or `group_size` is below 2.
    """
    scores, selected = grouped(scores, group_size, mask, 2)
    centred, count = _centre(scores, selected)
    # s_i - (sum - s_i) / (n - 1) is n / (n - 1) times (s_i - mean). A single row equals its mean, so the result is 0.
    return (centred * count / jnp.maximum(count - 1, 1)).reshape(-1)


def grpo(
    scores: Any, group_size: int, scale: str = "std", mask: Any = None, eps: Any = 1e-6, unbiased: bool = True
) -> jax.Array:
    """Each score minus its group's mean, divided by the group's standard deviation (GRPO, arXiv 2402.03300, sec. 4.1.2).

        A = (s - mean) / (std + eps)  ("std"),    A = s - mean  ("none")

    "none" is Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which avoids giving more weight to prompts that are almost always
    or almost never solved. The other half of Dr. GRPO is `masked.aggregate` with "token_sum_constant".

    Args:
      scores: real [B].
      group_size: responses to one prompt, in contiguous rows, at least 2; a Python int.
      scale: one of `SCALES`.
      mask: bool, int or float [B]; 0 for padding rows, whose score is not read. None counts all.
      eps: scalar, not negative, in units of the score; "none" ignores it.
      unbiased: the deviation divides by the count minus one (Bessel), as common implementations do; False: by the count.

    Returns:
      float32 [B]; for any eps exactly 0 for masked rows, for the only unmasked row of a group, and for groups of equal scores.

    Raises:
      ValueError: a shape differs, the rows do not divide into groups of `group_size`, `group_size` is below 2, the scale is
        unknown, or eps is negative.
    """
    require_choice("scale", scale, SCALES)
    require_scalar("eps", eps, 0)
    require_flag("unbiased", unbiased)
    scores, selected = grouped(scores, group_size, mask, 2)
    centred, count = _centre(scores, selected)
    if scale == "none":
        return centred.reshape(-1)
    # Divided by a power of two, which changes no digit, the squares of large differences stay finite.
    unit = jnp.ldexp(1.0, jnp.frexp(jax.lax.stop_gradient(jnp.max(jnp.abs(centred), axis=1, keepdims=True)))[1])
    squares = masked_sum((centred / unit) ** 2, selected, axis=1)[:, None]
    divisor = jnp.maximum(count - 1 if unbiased else count, 1)
    # The inner `where` keeps the gradient of the square root finite where the scores do not differ.
    differ = squares != 0
    deviation = unit * jnp.sqrt(jnp.where(differ, squares, 1) / divisor)
    return jnp.where(differ, centred / (deviation + eps), 0).reshape(-1)


def remax(scores: Any, greedy_scores: Any, mask: Any = None) -> jax.Array:
    """Each score minus the score of the greedy response to the same prompt (Li et al. 2023, arXiv 2310.10505).

    Args:
      scores: real [B], of sampled responses.
      greedy_scores: real [B], of the greedy response to each row's prompt.
      mask: bool, int or float [B]; 0 for padding rows, whose scores are not read. None counts all.

    Returns:
      float32 [B], 0 for masked rows.

    Raises:
      ValueError: a shape differs.
    """
    mask = jnp.ones(shape_of("scores", scores), bool) if mask is None else mask
    require_same_shape(scores=scores, greedy_scores=greedy_scores, mask=mask)
    require_shape("scores", scores, "[B]", (None,))
    selected = is_set(mask)
    scores, greedy_scores = (
        jnp.where(selected, as_float(name, x), 0) for name, x in (("scores", scores), ("greedy_scores", greedy_scores))
    )
    return scores - greedy_scores


def informative_groups(scores: Any, group_size: int, mask: Any = None, tolerance: Any = 0.0) -> jax.Array:
    """Marks rows whose group has unequal scores. In the other groups, all advantages and gradients are 0.

    The dynamic sampling of DAPO (Yu et al. 2025, arXiv 2503.14476) keeps these groups and replaces the others with new ones.

    Args:
      scores: real [B].
      group_size: responses to one prompt, in contiguous rows; scores in a group of 1 never differ.
      mask: bool, int or float [B]; 0 for padding rows, whose score is not read. None counts all.
      tolerance: scalar, not negative; scores that differ by at most this count as equal.

    Returns:
      bool [B]; False for masked rows, and for groups that contain NaN.

    Raises:
      ValueError: a shape differs, the rows do not divide into groups of `group_size`, or the tolerance is negative.
    """
    require_scalar("tolerance", tolerance, 0)
    scores, selected = grouped(scores, group_size, mask, 1)
    highest, lowest = _extremes(scores, selected)
    return (selected & (highest > lowest + tolerance)).reshape(-1)


def broadcast_to_tokens(advantages: Any, mask: Any) -> jax.Array:
    """Copies each row's advantage to its tokens.

    Args:
      advantages: real [B].
      mask: bool, int or float [B, T]; not 0 where the policy acted.

    Returns:
      float32 [B, T], 0 at masked tokens.

    Raises:
      ValueError: a shape differs.
    """
    require_shape("mask", mask, "[B, T]", (None, None))
    require_shape("advantages", advantages, "[B]", shape_of("mask", mask)[:1])
    return jnp.where(is_set(mask), as_float("advantages", advantages)[:, None], 0)


def grouped(scores: Any, size: int, mask: Any, least: int, name: str = "group_size") -> tuple[jax.Array, jax.Array]:
    """Checks scores and splits them into groups of contiguous rows.

    Args:
      scores: real [B].
      size: the rows of a group.
      mask: bool, int or float [B]; None counts all.
      least: the lowest valid size.
      name: the argument with the size, for error messages.

    Returns:
      (scores, selected), each [B / size, size]; scores are 0 where not selected.
    """
    mask = jnp.ones(shape_of("scores", scores), bool) if mask is None else mask
    require_same_shape(scores=scores, mask=mask)
    require_shape("scores", scores, "[B]", (None,))
    try:
        size = operator.index(size)
    except TypeError:
        raise ValueError(f"{name} is {size!r}; a whole number of at least {least} is expected") from None
    require_range(name, size, least)
    rows = shape_of("scores", scores)[0]
    if rows % size:
        raise ValueError(f"scores has {rows} rows; a multiple of {name} = {size} is expected")
    selected = jnp.reshape(is_set(mask), (rows // size, size))
    return jnp.where(selected, as_float("scores", scores).reshape(selected.shape), 0), selected


def _centre(scores: jax.Array, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> (scores minus their group's mean, 0 where not selected; number of selected scores [groups, 1])."""
    count = jnp.sum(selected, axis=1, keepdims=True).astype(scores.dtype)
    # Differences to the lowest score keep the digits of large scores that differ little. Equal scores give exactly 0.
    lowest = jax.lax.stop_gradient(_extremes(scores, selected)[1])
    above = jnp.where(selected, scores - jnp.where(count > 0, lowest, 0), 0)
    return jnp.where(selected, above - masked_mean(above, selected, axis=1)[:, None], 0), count


def _extremes(scores: jax.Array, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> (highest, lowest) of each group's selected scores, each [groups, 1]."""
    highest = jnp.max(jnp.where(selected, scores, -jnp.inf), axis=1, keepdims=True)
    return highest, jnp.min(jnp.where(selected, scores, jnp.inf), axis=1, keepdims=True)
