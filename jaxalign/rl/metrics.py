"""The metrics of RL's jitted steps, one record for each step, and those of a whole iteration.

Their fields follow the conventions of `steps.metrics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxalign.algorithms.masked import masked_mean
from jaxalign.steps.metrics import GradientMetrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperienceMetrics:
    """Metrics of `experience.packed_experience`, means over the scored responses unless noted; NaN if no response has a score.

    Attributes:
      score: the score of a response, in the reward's unit.
      score_std: the standard deviation of the scores, in the same unit, not a mean.
      reward: the sum of a response's rewards: its score and the penalties in the reward.
      kl_k1, kl_k3: two estimates of a response's KL to the reference, in nats.
      kl_full: the KL computed over the whole vocabulary, in nats; None unless it is in the reward.
      response_length: the number of tokens of a response.
      eos_rate: the share of responses that ended, 0 to 1.
      kept: the number of responses that have a weight in the update, not a mean.
      no_score: the number of responses to which the reward gave no score, not a mean.
      tokens: the number of response tokens, not a mean.
      sampler_gap: the largest difference between the sampler's and the trainer's log-probability of a token, in nats; None
        unless `setup.recomputes`, and for responses of older weights.
      correction_outside: the share of response tokens whose importance ratio is outside its bounds, 0 to 1; None without
        `config.ppo.sampler_correction`.
      effective_sample_share: the effective sample size of the importance weights, divided by their number; None without it.
      score_changed: the share of responses without a stop token, whose score `config.ppo.missing_eos` replaced, reduced or set
        to zero, 0 to 1; None if it keeps their scores.
      parts: by metric name, the mean of each part of a sum of rewards before its weight; the iteration adds it.
    """

    score: jax.Array
    score_std: jax.Array
    reward: jax.Array
    kl_k1: jax.Array
    kl_k3: jax.Array
    kl_full: jax.Array | None = None
    response_length: jax.Array
    eos_rate: jax.Array
    kept: jax.Array
    no_score: jax.Array
    tokens: jax.Array
    sampler_gap: jax.Array | None = None
    correction_outside: jax.Array | None = None
    effective_sample_share: jax.Array | None = None
    score_changed: jax.Array | None = None
    parts: Mapping[str, jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateMetrics(GradientMetrics):
    """Metrics of `update.minibatch_update`, and of `update.packed_update`: means over the minibatches that ran and have a
    response with a weight, unless noted. In an iteration without such a response these means and `ratio_max` are NaN, and the
    norms of the gradients are 0.

    `grad_norm` and `loss_scale` are the policy's; `skipped` and `overflowed` are sums over policy and critic.

    Attributes:
      policy_loss: the loss of the policy with its KL penalty and entropy bonus.
      entropy: the mean entropy, in nats per token.
      ratio_mean: the mean ratio of the new to the old policy's probability of a token.
      ratio_max: the largest ratio; of an iteration, over all its minibatches.
      clip_fraction: the share of tokens whose policy loss is clipped, 0 to 1.
      approx_kl: an estimate of the KL between old and new policy, in nats per token.
      sampler_gap: the largest difference between the old and the policy's log-probability of a token, in nats; of an
        iteration, in its first minibatch. None if `ExperienceMetrics` reports the gap, and for responses of older weights.
      value_loss: the critic's loss without its coefficient; None without a critic.
      value_clip_fraction: the share of tokens whose value loss is clipped, 0 to 1; None without a critic.
      explained_variance: the share of the returns' variance that the values explain, at most 1, over the whole experience. None
        without a critic and, unless `setup.values_in_update`, for a minibatch.
      critic_grad_norm, critic_loss_scale: `grad_norm` and `loss_scale` of a separate critic; otherwise None.
      kl_coef: the weight of the KL penalty in this iteration; None for a minibatch.
      epochs_run: the number of epochs that ran, a multiple of 1 / minibatches; None for a minibatch.
      stopped_early: 1 if `config.ppo.target_kl` ended the iteration early, otherwise 0; None for a minibatch.
    """

    policy_loss: jax.Array
    entropy: jax.Array
    ratio_mean: jax.Array
    ratio_max: jax.Array
    clip_fraction: jax.Array
    approx_kl: jax.Array
    sampler_gap: jax.Array | None
    value_loss: jax.Array | None = None
    value_clip_fraction: jax.Array | None = None
    explained_variance: jax.Array | None = None
    critic_grad_norm: jax.Array | None = None
    critic_loss_scale: jax.Array | None = None
    kl_coef: jax.Array | None = None
    epochs_run: jax.Array | None = None
    stopped_early: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """The metrics of one iteration."""

    experience: ExperienceMetrics
    update: UpdateMetrics


def mean_of(x, rows) -> jax.Array:
    """The mean of a quantity over some responses.

    Args:
      x: real or bool [B].
      rows: bool [B], the responses.

    Returns:
      A float32 scalar; NaN without such a response.
    """
    return jnp.where(jnp.any(rows), masked_mean(jnp.asarray(x, jnp.float32), rows), jnp.nan)
