"""From a rollout to experience: log-probs, values, scores, rewards and advantages, in one jitted call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.advantages import gae
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.masked import masked_mean, masked_sum
from jaxalign.algorithms.rewards import normalise_scores, shape_rewards
from jaxalign.models.heads import TokenStats, gather_positions, length_mask, response_positions, token_stats
from jaxalign.models.model import Model
from jaxalign.records import Experience, Rollout
from jaxalign.training.ppo_state import FrozenRoles, PPOSetup
from jaxalign.training.preference_step import sequence_scores


def response_stats(model: Model, params, rollout: Rollout, temperature: float) -> TokenStats:
    """Log-probs and entropies [B, N] of the response's tokens, at the sampling temperature: the same for the policy and
    its reference, so that equal weights give a KL of 0 (Pitfall 2). The head sees response positions only."""
    place = response_positions(rollout.prompt_length, rollout.logprobs.shape[1])
    hidden = gather_positions(model.hidden(params, rollout.tokens), place - 1)
    return token_stats(hidden, model.unembedding(params), gather_positions(rollout.tokens, place), temperature)


def response_values(model: Model, params, rollout: Rollout):
    """The critic's value [B, N] of the state before each response token."""
    place = response_positions(rollout.prompt_length, rollout.logprobs.shape[1])
    return model.scores(params, gather_positions(model.hidden(params, rollout.tokens), place - 1))


def response_mask(rollout: Rollout):
    """float32 [B, N], by length (Decision 5)."""
    return length_mask(rollout.response_length, rollout.logprobs.shape[1])


@functools.partial(jax.jit, static_argnames=("setup", "recompute"))
def make_experience(setup: PPOSetup, recompute: bool, roles: FrozenRoles, policy_params, critic_params, kl_coef, rollout):
    """(Experience, metrics) of a rollout. With `recompute` the old log-probs are the trainer's, not the sampler's."""
    config, mask = setup.config, response_mask(rollout)
    temperature = config.temperature or 1.0
    reference = response_stats(setup.policy, roles.reference, rollout, temperature).logprobs * mask
    logprobs = rollout.logprobs
    if recompute:
        logprobs = response_stats(setup.policy, policy_params, rollout, temperature).logprobs * mask
    values = response_values(setup.critic, critic_params, rollout) * mask
    length = rollout.prompt_length + rollout.response_length
    raw = sequence_scores(setup.critic, roles.preference, rollout.tokens, length)
    scores = normalise_scores(raw, setup.shift, setup.scale, config.score_clip)
    kl = kl_penalty(logprobs, reference, config.kl_estimator) * mask
    rewards = shape_rewards(
        scores, kl, kl_coef, rollout.response_length, rollout.ended, config.missing_eos, config.missing_eos_value
    )
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    k1, k3 = (masked_sum(kl_penalty(logprobs, reference, kind), mask, axis=1) for kind in ("k1", "k3"))
    real = (rollout.prompt_length > 0).astype(jnp.float32)
    metrics = {
        "score": masked_mean(scores, real),
        "reward": masked_mean(jnp.sum(rewards, axis=1), real),
        "kl_k1": masked_mean(k1, real),
        "kl_k3": masked_mean(k3, real),
        "response_length": masked_mean(rollout.response_length.astype(jnp.float32), real),
        "eos_rate": masked_mean(rollout.ended.astype(jnp.float32), real),
        "tokens": jnp.sum(rollout.response_length).astype(jnp.float32),
    }
    rollout = Rollout(rollout.tokens, rollout.prompt_length, rollout.response_length, logprobs, rollout.ended)
    return Experience(rollout, reference, values, rewards, advantages, returns), metrics
