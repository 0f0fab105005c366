"""A learnt reward as all that score with it see it: one record, hashable, with the weights beside it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.rewards import normalise_scores
from jaxalign.models.model import Model
from jaxalign.records import PairBatch, Rollout, ScoredPairs
from jaxalign.training.preference_step import sequence_scores


@dataclasses.dataclass(frozen=True)
class Scorer:
    """How responses are scored, without the weights; static for jit.

    model has a scalar head; its sizes need not be the policy's. A raw score becomes (raw - shift) / scale, then is clipped
    to +-clip unless that is None.
    """

    model: Model
    shift: float = 0.0
    scale: float = 1.0
    clip: float | None = None


def raw_scores(scorer: Scorer, params, tokens, length):
    """float32 [B]: scores of whole sequences before normalisation. tokens int32 [B, T], length int32 [B]."""
    return sequence_scores(scorer.model, params, tokens, jnp.maximum(length, 1))


@functools.partial(jax.jit, static_argnames=("scorer",))
def raw_sequence_scores(scorer: Scorer, params, tokens, length):
    """`raw_scores`, jitted."""
    return raw_scores(scorer, params, tokens, length)


@functools.partial(jax.jit, static_argnames=("scorer",))
def raw_pair_scores(scorer: Scorer, params, pairs: PairBatch | ScoredPairs):
    """float32 [B, 2]: raw scores of both sequences of each pair."""
    B, _, T = pairs.tokens.shape
    return raw_scores(scorer, params, pairs.tokens.reshape(2 * B, T), pairs.length.reshape(2 * B)).reshape(B, 2)


@functools.partial(jax.jit, static_argnames=("scorer",))
def raw_rollout_scores(scorer: Scorer, params, rollout: Rollout):
    """float32 [B]: raw scores of prompt and response."""
    return raw_scores(scorer, params, rollout.tokens, rollout.prompt_length + rollout.response_length)


@functools.partial(jax.jit, static_argnames=("scorer",))
def rollout_scores(scorer: Scorer, params, rollout: Rollout):
    """float32 [B]: normalised scores of prompt and response, what RL is rewarded by."""
    raw = raw_scores(scorer, params, rollout.tokens, rollout.prompt_length + rollout.response_length)
    return normalise_scores(raw, scorer.shift, scorer.scale, scorer.clip)
