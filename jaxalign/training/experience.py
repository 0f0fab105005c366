"""From a scored rollout to experience: log-probs, values, rewards and advantages, in one jitted call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.advantages import gae, reinforce_baseline, reinforce_plus_plus, vtrace
from jaxalign.algorithms.groups import broadcast_to_tokens, grpo, informative_groups, remax, rloo
from jaxalign.algorithms.importance import effective_sample_share, importance_weights
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.masked import masked_mean, masked_sum
from jaxalign.algorithms.rewards import overlong_penalty, shape_rewards
from jaxalign.config import Ppo
from jaxalign.models.heads import TokenStats, gather_positions, length_mask, response_positions, token_kl
from jaxalign.models.model import Model
from jaxalign.records import Experience, Rollout
from jaxalign.training.ppo_state import PPOSetup


def response_hidden(model: Model, params, rollout: Rollout):
    """The trunk's last hidden state [B, N, D] before each response token."""
    place = response_positions(rollout.prompt_length, rollout.logprobs.shape[1])
    return gather_positions(model.hidden(params, rollout.tokens), place - 1)


def response_stats(model: Model, params, rollout: Rollout, temperature: float, hidden=None) -> TokenStats:
    """Log-probs and entropies [B, N] of the response's tokens, at the sampling temperature: the same for the policy and
    its reference, so that equal weights give a KL of 0 (Pitfall 2). The head sees response positions only. hidden: what
    `response_hidden` gives, where it is known."""
    hidden = response_hidden(model, params, rollout) if hidden is None else hidden
    place = response_positions(rollout.prompt_length, rollout.logprobs.shape[1])
    targets = gather_positions(rollout.tokens, place)
    return model.token_stats(params, hidden, targets, temperature)


def response_kl(setup: PPOSetup, params, reference_params, rollout: Rollout, temperature: float, hidden=None):
    """The whole KL(policy || reference) [B, N] at the state before each response token, with its gradient into params."""
    hidden = response_hidden(setup.policy, params, rollout) if hidden is None else hidden
    reference = jax.lax.stop_gradient(response_hidden(setup.reference, reference_params, rollout))
    weights = setup.policy.head_weight(params, hidden.dtype), setup.reference.head_weight(reference_params, reference.dtype)
    room, cap, constrain = setup.policy.chunk_floats, setup.policy.config.final_softcap, setup.policy.constrain
    return token_kl(hidden, weights[0], reference, weights[1], temperature, room, cap, constrain)


def response_values(model: Model, params, rollout: Rollout, hidden=None):
    """The critic's value [B, N] of the state before each response token."""
    return model.scores(params, response_hidden(model, params, rollout) if hidden is None else hidden)


def response_mask(rollout: Rollout):
    """float32 [B, N], by length (Decision 5)."""
    return length_mask(rollout.response_length, rollout.logprobs.shape[1])


def experience_mask(experience: Experience):
    """float32 [B, N]: 1 at the response tokens of the rows that count."""
    return response_mask(experience.rollout) * experience.weight[:, None]


def _rewards(config: Ppo, rollout: Rollout, scores, kl, kl_coef, overlong_buffer: int):
    """Rewards [B, N]: the KL's price, and at the end the score after the missing-eos rule, less the price of being too long."""
    rewards = shape_rewards(
        scores, kl, kl_coef, rollout.response_length, rollout.ended, config.missing_eos, config.missing_eos_value
    )
    if overlong_buffer:  # After the missing-eos rule, which puts other scores in the place of those it judges.
        penalty = overlong_penalty(rollout.response_length, config.max_new_tokens, overlong_buffer)
        last = jnp.arange(kl.shape[1])[None, :] == rollout.response_length[:, None] - 1
        rewards = rewards + jnp.where(last, penalty[:, None], 0.0)
    return rewards


def greedy_baseline(config: Ppo, rollout: Rollout, scores):
    """float32 [B]: what greedy responses would have been paid by the rules that the samples are paid by, but for the KL."""
    none = jnp.zeros_like(rollout.logprobs)
    return jnp.sum(_rewards(config, rollout, scores, none, 0.0, config.overlong_buffer), axis=1)


@functools.partial(jax.jit, static_argnames=("setup", "recompute"))
def make_experience(
    setup: PPOSetup, recompute: bool, reference_params, policy_params, critic_params, kl_coef, rollout: Rollout, scores,
    kept=None, baseline=None,
):  # fmt: skip
    """(Experience, metrics) of a scored rollout.

    scores float32 [B]; kept bool [B] or None: rows whose score was dropped do not count; baseline float32 [B], the
    `greedy_baseline` of the same prompts, for "remax". critic_params are None without a critic, and the
    policy's where it is a head of the policy's. With `recompute` the old log-probs are the trainer's, not the sampler's.
    """
    config, mask = setup.config, response_mask(rollout) > 0
    real = rollout.prompt_length > 0
    scored = real if kept is None else real & kept
    kept, scores = scored, jnp.where(scored, scores, 0.0)
    temperature = config.temperature or 1.0
    zeroed = lambda x: jnp.where(mask, x, 0.0)  # noqa: E731
    reference = zeroed(response_stats(setup.reference, reference_params, rollout, temperature).logprobs)
    logprobs = rollout.logprobs
    if recompute:
        logprobs = zeroed(response_stats(setup.policy, policy_params, rollout, temperature).logprobs)
    values = zeroed(response_values(setup.critic, critic_params, rollout)) if setup.has_critic else jnp.zeros_like(reference)
    if config.kl_estimator != "full":
        kl = zeroed(kl_penalty(logprobs, reference, config.kl_estimator))
    elif config.kl_in == "reward":
        kl = zeroed(response_kl(setup, policy_params, reference_params, rollout, temperature))
    else:  # It is measured where it is learnt from, in the loss.
        kl = jnp.zeros_like(reference)
    rewards = _rewards(config, rollout, scores, kl, kl_coef if config.kl_in == "reward" else 0.0, config.overlong_buffer)
    if config.skip_equal_groups:
        settled = jnp.sum(_rewards(config, rollout, scores, jnp.zeros_like(kl), 0.0, 0), axis=1)
        kept = kept & informative_groups(settled, config.group_size, kept)
    counted = mask & kept[:, None]
    log_ratios = logprobs - rollout.logprobs
    advantages, returns = _advantages(setup, rewards, values, log_ratios, counted, kept, baseline)
    k1, k3 = (masked_sum(kl_penalty(logprobs, reference, kind), mask, axis=1) for kind in ("k1", "k3"))
    mean = lambda x: masked_mean(x.astype(jnp.float32), scored)  # noqa: E731
    metrics = {
        "score": mean(scores), "reward": mean(jnp.sum(rewards, axis=1)), "kl_k1": mean(k1), "kl_k3": mean(k3),
        "response_length": mean(rollout.response_length), "eos_rate": mean(rollout.ended),
        "kept": jnp.sum(kept).astype(jnp.float32), "tokens": jnp.sum(rollout.response_length).astype(jnp.float32),
    }  # fmt: skip
    if config.kl_estimator == "full" and config.kl_in == "reward":
        metrics["kl_full"] = mean(masked_sum(kl, mask, axis=1))
    if setup.recomputes:
        metrics["sampler_gap"] = jnp.max(jnp.where(mask, jnp.abs(log_ratios), 0))
    importance = mask.astype(jnp.float32)
    if config.sampler_correction != "none":
        importance, weights = importance_weights(
            logprobs, rollout.logprobs, mask, config.correction_level, config.sampler_correction, high=config.correction_cap
        )
        metrics["correction_outside"] = masked_mean(weights.outside.astype(jnp.float32), counted)
        metrics["effective_sample_share"] = (
            effective_sample_share(importance, counted) if config.correction_level == "token"
            else effective_sample_share(importance[:, 0], kept)
        )  # fmt: skip
    rollout = Rollout(rollout.tokens, rollout.prompt_length, rollout.response_length, logprobs, rollout.ended)
    weight = kept.astype(jnp.float32)
    return Experience(rollout, weight, reference, values, rewards, advantages, returns, importance), metrics


def _advantages(setup: PPOSetup, rewards, values, log_ratios, mask, kept, baseline):
    """(advantages, returns) float32 [B, N]; returns are what the critic learns, 0 without one. log_ratios [B, N]: the policy's
    log-probs at the start of the update less the sampler's."""
    config = setup.config
    if config.advantages == "gae":
        return gae(rewards, values, mask, config.gamma, config.lam)
    if config.advantages == "reinforce":
        return reinforce_baseline(rewards, values, mask, config.gamma)
    if config.advantages == "vtrace":
        found = vtrace(rewards, values, log_ratios, mask, config.gamma, config.lam)
        return found.advantages, found.targets
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
