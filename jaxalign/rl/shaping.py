"""Turns scores into rewards per token: the KL penalty, the missing-eos rule, and the overlong penalty."""

from __future__ import annotations

import jax.numpy as jnp

from jaxalign.algorithms.groups import informative_groups
from jaxalign.algorithms.rewards import overlong_penalty, shape_rewards
from jaxalign.config import PPOConfig
from jaxalign.records import Rollout


def token_rewards(section: PPOConfig, rollout: Rollout, scores, kl, kl_coef, overlong_buffer: int):
    """Rewards float32 [B, N]: -kl_coef * kl on each token, the scores, and the overlong penalty on the last token.

    Args:
      section: `config.ppo`, for its fields missing_eos, missing_eos_value and max_new_tokens.
      rollout: B responses of at most N tokens.
      scores: float32 [B], added to the last token, or [B, N], added to each.
      kl: float32 [B, N], 0 past the response.
      kl_coef: scalar.
      overlong_buffer: the number of tokens below max_new_tokens over which the penalty grows to 1; 0 for no penalty.
    """
    rewards = shape_rewards(
        scores, kl, kl_coef, rollout.response_length, rollout.ended, section.missing_eos, section.missing_eos_value
    )
    if overlong_buffer:  # After the missing-eos rule, which replaces scores.
        penalty = overlong_penalty(rollout.response_length, section.max_new_tokens, overlong_buffer)
        last = jnp.arange(kl.shape[1])[None, :] == rollout.response_length[:, None] - 1
        rewards = rewards + jnp.where(last, penalty[:, None], 0.0)
    return rewards


def level_equal_groups(section: PPOConfig, rollout: Rollout, scores, rewards, rounding, kept):
    """The rewards [B, N], without the KL penalty in groups whose scores are equal and whose totals differ by rounding alone.

    Estimators that divide by a group's deviation would scale the rounding errors of the KL to whole advantages.

    Args:
      section: `config.ppo`.
      rollout: the B responses.
      scores: float32 [B] or [B, N].
      rewards: float32 [B, N], with the KL penalty.
      rounding: float32 [B], a bound of the rounding error of each row's KL penalty.
      kept: bool [B], the rows that count.
    """
    plain = token_rewards(section, rollout, scores, jnp.zeros_like(rewards), 0.0, section.overlong_buffer)
    size, tolerance = section.group_size, jnp.max(jnp.where(kept, rounding, 0), initial=0)
    differ = informative_groups(jnp.sum(plain, axis=1), size, kept)
    differ = differ | informative_groups(jnp.sum(rewards, axis=1), size, kept, tolerance)
    return jnp.where(differ[:, None], rewards, plain)


def greedy_baseline(section: PPOConfig, rollout: Rollout, scores):
    """float32 [B]: the total reward of greedy responses, by the same rules as for samples but without a KL penalty."""
    none = jnp.zeros_like(rollout.logprobs)
    return jnp.sum(token_rewards(section, rollout, scores, none, 0.0, section.overlong_buffer), axis=1)
