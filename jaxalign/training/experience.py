"""From a scored rollout to experience: log-probs, values, rewards and advantages, in one jitted call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.advantages import gae, reinforce_baseline, reinforce_plus_plus
from jaxalign.algorithms.groups import broadcast_to_tokens, grpo, informative_groups, remax, rloo
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.masked import masked_mean, masked_sum
from jaxalign.algorithms.rewards import overlong_penalty, shape_rewards
from jaxalign.models.heads import TokenStats, gather_positions, length_mask, response_positions, token_stats
from jaxalign.models.model import Model
from jaxalign.records import Experience, Rollout
from jaxalign.training.ppo_state import PPOSetup


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


def experience_mask(experience: Experience):
    """float32 [B, N]: 1 at the response tokens of the rows that count."""
    return response_mask(experience.rollout) * experience.weight[:, None]


@functools.partial(jax.jit, static_argnames=("setup", "recompute"))
def make_experience(
    setup: PPOSetup, recompute: bool, reference_params, policy_params, critic_params, kl_coef, rollout: Rollout, scores,
    kept=None, baseline=None,
):  # fmt: skip
    """(Experience, metrics) of a scored rollout.

    scores float32 [B]; kept bool [B] or None: rows whose score was dropped do not count; baseline float32 [B], the scores
    of greedy responses to the same prompts, for "remax". critic_params are None without a critic. With `recompute` the
    old log-probs are the trainer's, not the sampler's.
    """
    config, mask = setup.config, response_mask(rollout) > 0
    real = rollout.prompt_length > 0
    scored = real if kept is None else real & kept
    kept, scores = scored, jnp.where(scored, scores, 0.0)
    temperature = config.temperature or 1.0
    zeroed = lambda x: jnp.where(mask, x, 0.0)  # noqa: E731
    reference = zeroed(response_stats(setup.policy, reference_params, rollout, temperature).logprobs)
    logprobs = rollout.logprobs
    if recompute:
        logprobs = zeroed(response_stats(setup.policy, policy_params, rollout, temperature).logprobs)
    values = zeroed(response_values(setup.critic, critic_params, rollout)) if setup.has_critic else jnp.zeros_like(reference)
    kl = zeroed(kl_penalty(logprobs, reference, config.kl_estimator))
    ends = (rollout.response_length, rollout.ended, config.missing_eos, config.missing_eos_value)
    rewards = shape_rewards(scores, kl, kl_coef if config.kl_in == "reward" else 0.0, *ends)
    if config.overlong_buffer:  # After the missing-eos rule, which puts other scores in the place of those it judges.
        penalty = overlong_penalty(rollout.response_length, config.max_new_tokens, config.overlong_buffer)
        last = jnp.arange(mask.shape[1])[None, :] == rollout.response_length[:, None] - 1
        rewards = rewards + jnp.where(last, penalty[:, None], 0.0)
    if config.skip_equal_groups:
        settled = jnp.sum(shape_rewards(scores, jnp.zeros_like(kl), 0.0, *ends), axis=1)
        kept = kept & informative_groups(settled, config.group_size, kept)
    advantages, returns = _advantages(setup, rewards, values, mask & kept[:, None], kept, baseline)
    k1, k3 = (masked_sum(kl_penalty(logprobs, reference, kind), mask, axis=1) for kind in ("k1", "k3"))
    mean = lambda x: masked_mean(x.astype(jnp.float32), scored)  # noqa: E731
    metrics = {
        "score": mean(scores), "reward": mean(jnp.sum(rewards, axis=1)), "kl_k1": mean(k1), "kl_k3": mean(k3),
        "response_length": mean(rollout.response_length), "eos_rate": mean(rollout.ended),
        "kept": jnp.sum(kept).astype(jnp.float32), "tokens": jnp.sum(rollout.response_length).astype(jnp.float32),
    }  # fmt: skip
    rollout = Rollout(rollout.tokens, rollout.prompt_length, rollout.response_length, logprobs, rollout.ended)
    return Experience(rollout, kept.astype(jnp.float32), reference, values, rewards, advantages, returns), metrics


def _advantages(setup: PPOSetup, rewards, values, mask, kept, baseline):
    """(advantages, returns) float32 [B, N]; returns are what the critic learns, 0 without one."""
    config = setup.config
    if config.advantages == "gae":
        return gae(rewards, values, mask, config.gamma, config.lam)
    if config.advantages == "reinforce":
        return reinforce_baseline(rewards, values, mask, config.gamma)
    if config.advantages == "reinforce_pp":
        groups = config.group_size if config.group_size > 1 else None
        return reinforce_plus_plus(rewards, mask, config.gamma, groups), jnp.zeros_like(rewards)
    total = jnp.sum(rewards, axis=1)
    if config.advantages == "rloo":
        rows = rloo(total, config.group_size, kept)
    elif config.advantages == "grpo":
        rows = grpo(total, config.group_size, config.group_scale, kept)
    else:
        rows = remax(total, baseline, kept)
    return broadcast_to_tokens(rows, mask), jnp.zeros_like(rewards)
