"""The losses of policy and critic over the responses of a minibatch or of one of its parts.

Every sum is divided by a count of the whole minibatch, so the loss and its gradient do not depend on how the minibatch is
packed or split over devices.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms.importance import limit_log_ratio
from jaxalign.algorithms.kl import kl_loss
from jaxalign.algorithms.masked import aggregate, aggregate_total
from jaxalign.algorithms.value_losses import clipped_value_loss, huber_value_loss
from jaxalign.records import AnswerRows, Experience
from jaxalign.rl.estimators import AdvantageInputs, estimate
from jaxalign.rl.policy_losses import surrogate as surrogate_of
from jaxalign.rl.responses import experience_mask, response_hidden, response_kl, response_stats, response_values
from jaxalign.rl.state import PPOSetup
from jaxalign.steps.microbatch import Aux
from jaxalign.steps.packed import alone


class Totals(NamedTuple):
    """Counts of a whole minibatch, float32 []: its number of response tokens, and the divisor of the policy loss."""

    tokens: jax.Array
    policy: jax.Array


def totals(setup: PPOSetup, batch: Experience) -> Totals:
    """The counts that normalise losses over parts of `batch`."""
    mask = experience_mask(batch)
    return Totals(jnp.sum(mask), aggregate_total(mask, setup.config.aggregation, setup.config.max_new_tokens))


def policy_loss(
    setup: PPOSetup, params, batch: Experience, whole: Totals, kl_coef, hidden=None, reference_params=None,
    rows: AnswerRows | None = None,
):
    """(loss, Aux) of the policy: surrogate, KL penalty and entropy bonus, aggregated according to `config.ppo.aggregation`.

    Args:
      setup: models and options.
      params: the policy's parameters; with adapters, joined with the base.
      batch: the experience, whose advantages are already whitened if `config.ppo.whiten_advantages` is set.
      whole: the counts of the whole minibatch.
      kl_coef: the weight of the KL penalty, if `config.ppo.kl_in` is "loss".
      hidden: the trunk's hidden states for `rows`, if already computed.
      reference_params: the reference's joined parameters if `setup.loss_reads_reference`, else None.
      rows: the packed rows; None gives each response its own row.

    Raises:
      ValueError: the loss reads the reference but `reference_params` is None.
      UserError: a custom policy loss raises, or returns the wrong shape or dtype.
    """
    config, mask, old = setup.config, experience_mask(batch), batch.rollout.logprobs
    temperature = config.temperature or 1.0
    rows = alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.policy, params, rows) if hidden is None else hidden
    stats = response_stats(setup.policy, params, batch.rollout, temperature, hidden, rows)
    chex.assert_equal_shape([stats.logprobs, old, batch.advantages, batch.reference_logprobs, mask])
    limited = limit_log_ratio(stats.logprobs, old, config.log_ratio_limit)
    per_token, surrogate = surrogate_of(config, limited, old, batch.advantages, mask)
    if config.sampler_correction != "none":
        per_token = jnp.where(mask > 0, batch.importance, 0) * per_token
    if setup.loss_reads_reference:
        if reference_params is None:
            raise ValueError("kl_estimator 'full' in the loss needs the parameters of the reference")
        kl = response_kl(
            setup.policy, params, setup.reference, reference_params, batch.rollout, temperature, hidden, rows
        )
        per_token = per_token + kl_coef * jnp.where(mask > 0, kl, 0)
    elif config.kl_in == "loss":
        limit = config.log_ratio_limit if config.kl_estimator == "k3" else None
        limited = limit_log_ratio(stats.logprobs, batch.reference_logprobs, limit)
        per_token = per_token + kl_coef * kl_loss(limited, batch.reference_logprobs, config.kl_estimator, mask)
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * jnp.where(mask > 0, stats.entropy, 0)
    loss = aggregate(per_token, mask, config.aggregation, whole.policy)

    def mean(x):
        return aggregate(x, mask, total=whole.tokens)

    def largest(x):
        return jnp.max(jnp.where(mask > 0, x, 0))

    sums = {
        "policy_loss": loss,
        "entropy": mean(stats.entropy),
        "ratio_mean": mean(surrogate.ratio),
        "clip_fraction": mean(surrogate.clipped.astype(jnp.float32)),
        "approx_kl": mean(surrogate.approx_kl),
    }
    return loss, Aux(sums, {"ratio_max": largest(surrogate.ratio), "sampler_gap": largest(jnp.abs(stats.logprobs - old))})


def value_loss(setup: PPOSetup, params, batch: Experience, whole: Totals, hidden=None, rows: AnswerRows | None = None):
    """(value_coef * loss, Aux) of the critic. Takes the arguments of `policy_loss`."""
    config, mask = setup.config, experience_mask(batch)
    values = response_values(setup.critic, params, batch.rollout, hidden, rows)
    chex.assert_equal_shape([values, batch.values, batch.returns, mask])
    if config.value_loss == "huber":
        loss, clipped = huber_value_loss(
            values, batch.returns, config.huber_delta, mask, batch.values, config.value_clip
        )
    else:
        loss, clipped = clipped_value_loss(values, batch.values, batch.returns, config.value_clip, mask)
    loss = aggregate(loss, mask, total=whole.tokens)
    sums = {"value_loss": loss, "value_clip_fraction": aggregate(clipped.astype(jnp.float32), mask, total=whole.tokens)}
    return config.value_coef * loss, Aux(sums)


def first_value_loss(setup: PPOSetup, params, batch: Experience, whole: Totals, rows: AnswerRows | None = None):
    """`value_loss` for `setup.values_in_update`: old values and returns come from this update's own forward pass.

    `Aux.sums` has the values [B, N] as "values".
    """
    mask, rows = experience_mask(batch), alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.critic, params, rows)
    values = jax.lax.stop_gradient(response_values(setup.critic, params, batch.rollout, hidden, rows))
    valued = with_values(setup, batch, jnp.where(mask > 0, values, 0))
    loss, aux = value_loss(setup, params, valued, whole, hidden, rows)
    return loss, Aux({**aux.sums, "values": valued.values}, aux.maxima)


def with_values(setup: PPOSetup, batch: Experience, values) -> Experience:
    """The experience with these values [B, N], and with advantages and returns computed from them."""
    mask, none = experience_mask(batch) > 0, jnp.zeros_like(values)
    inputs = AdvantageInputs(batch.rewards, values, none, mask, batch.weight > 0, None, setup.config)
    advantages, returns = estimate(inputs)
    return dataclasses.replace(batch, values=values, advantages=advantages, returns=returns)


def joint_loss(
    setup: PPOSetup, params, batch: Experience, whole: Totals, kl_coef, reference_params=None, rows: AnswerRows | None = None
):
    """(policy loss + value_coef * value loss, Aux) for a trunk with both heads. The trunk runs once."""
    rows = alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.policy, params, rows)
    loss, policy = policy_loss(setup, params, batch, whole, kl_coef, hidden, reference_params, rows)
    value, critic = value_loss(setup, params, batch, whole, hidden, rows)
    return loss + value, Aux({**policy.sums, **critic.sums}, policy.maxima)
