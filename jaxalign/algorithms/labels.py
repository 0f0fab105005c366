"""Soft labels and direct rewards from the log-probabilities that a judge gives to its options."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape

DIRECT_SCORES = 10

# A few float32 ulps of 0.5, so that the labels .4 and .6 are both undecided at margin .1 (in float32, .6 - .5 > .1).
_ROUNDING = 1e-6


def option_label(logprob_a: Any, logprob_b: Any, logprob_tie: Any = None) -> jax.Array:
    """P(A) from the log-probabilities of the options, normalised over them (Bai et al. 2022, arXiv 2212.08073).

    Args:
      logprob_a: real, any shape; log-probability of the option (A). -inf is allowed.
      logprob_b: the same shape.
      logprob_tie: the same shape, of the option that neither is better; half of its probability counts as (A). None: there is
        no such option.

    Returns:
      float32 of that shape, in [0, 1]; .5 (undecided at every margin) where all options have probability 0.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(logprob_a=logprob_a, logprob_b=logprob_b)
    logprob_a, logprob_b = as_float("logprob_a", logprob_a), as_float("logprob_b", logprob_b)
    impossible = jnp.isneginf(logprob_a) & jnp.isneginf(logprob_b)
    label = jnp.where(impossible, 0.5, jax.nn.sigmoid(logprob_a - logprob_b))
    if logprob_tie is None:
        return label
    return 0.5 + (label - 0.5) * (1 - tie_share(logprob_a, logprob_b, logprob_tie))


def tie_share(logprob_a: Any, logprob_b: Any, logprob_tie: Any) -> jax.Array:
    """The probability of a tie, normalised over the three options.

    Args:
      logprob_a: real, any shape; log-probability of the option (A). -inf is allowed.
      logprob_b: the same shape.
      logprob_tie: the same shape.

    Returns:
      float32 of that shape, in [0, 1]; 1 where all options have probability 0.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(logprob_a=logprob_a, logprob_b=logprob_b, logprob_tie=logprob_tie)
    logprob_tie = as_float("logprob_tie", logprob_tie)
    either = jnp.logaddexp(as_float("logprob_a", logprob_a), as_float("logprob_b", logprob_b))
    return jnp.where(jnp.isneginf(either), 1.0, jax.nn.sigmoid(logprob_tie - either))


def average_orders(label_ab: Any, label_ba: Any) -> jax.Array:
    """The mean of P(A preferred) over both presentation orders of a pair, to reduce position bias.

    Args:
      label_ab: real, any shape, in [0, 1]: P(A preferred) with A shown first.
      label_ba: the same shape: P(A preferred) with the same A shown second.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: the shapes differ, or a label is outside [0, 1].
    """
    require_same_shape(label_ab=label_ab, label_ba=label_ba)
    for name, label in (("label_ab", label_ab), ("label_ba", label_ba)):
        require_range(name, label, 0, 1)
    return 0.5 * (as_float("label_ab", label_ab) + as_float("label_ba", label_ba))


def clamp_label(label: Any, low: Any, high: Any) -> jax.Array:
    """Clamps `label` to [low, high], because after chain-of-thought reasoning the options' probabilities are near 0 or 1.

    Bai et al. 2022 (arXiv 2212.08073) clamp to [.4, .6].

    Args:
      label: real, any shape, in [0, 1].
      low: scalar in [0, .5].
      high: scalar in [.5, 1].

    Returns:
      float32 of the shape of `label`.

    Raises:
      ValueError: a label or a limit is outside its range.
    """
    require_range("label", label, 0, 1)
    require_range("low", low, 0, 0.5)
    require_range("high", high, 0.5, 1)
    return jnp.clip(as_float("label", label), low, high)


def invert_label(label: Any) -> jax.Array:
    """1 - label, for the swapped pair, as float32. Takes any shape. Raises ValueError outside [0, 1]."""
    require_range("label", label, 0, 1)
    return 1 - as_float("label", label)


def is_undecided(label: Any, margin: Any) -> jax.Array:
    """Where |label - .5| <= margin, up to rounding; at margin 0 only a label of .5 is undecided.

    Test the averaged label before clamping it: after a clamp to [.5 - margin, .5 + margin] every label is undecided.

    Args:
      label: real, any shape, in [0, 1].
      margin: scalar in [0, .5].

    Returns:
      bool of the shape of `label`.

    Raises:
      ValueError: a label or the margin is outside its range.
    """
    require_range("label", label, 0, 1)
    require_range("margin", margin, 0, 0.5)
    return jnp.abs(as_float("label", label) - 0.5) <= margin + _ROUNDING


def expected_score(logprobs: Any) -> jax.Array:
    """The expected score, sum of i P(i) over i = 1..10, of a judge that answers with a number (arXiv 2309.00267).

    Args:
      logprobs: real [..., 10], log-probabilities of the answers 1..10 in this order; this function normalises them.

    Returns:
      float32 [...], in 1..10. NaN where all ten have probability 0, because a neutral score would hide the missing answer.

    Raises:
      ValueError: the last axis is not of size 10.
    """
    leading = np.shape(logprobs)[:-1]
    require_shape("logprobs", logprobs, "[..., 10]", (*leading, DIRECT_SCORES))
    probabilities = jax.nn.softmax(as_float("logprobs", logprobs), axis=-1)
    return probabilities @ jnp.arange(1, DIRECT_SCORES + 1, dtype=probabilities.dtype)


def direct_reward(score: Any) -> jax.Array:
    """(score - 5.5) / 4.5, which maps 1..10 to [-1, 1], as float32. Takes any shape. Raises ValueError outside 1..10."""
    require_range("score", score, 1, DIRECT_SCORES, tolerance=1e-5)
    return (as_float("score", score) - 5.5) / 4.5
