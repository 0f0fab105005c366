"""Turns a rollout into experience: scores, log-probabilities, values, rewards and advantages, in one jitted call.

The rewards of tokens are the scores with the KL penalty, the missing-eos rule and the overlong penalty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms.groups import informative_groups
from jaxalign.algorithms.importance import effective_sample_share, importance_weights, limit_log_ratio
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.masked import masked_mean, masked_sum
from jaxalign.algorithms.rewards import overlong_penalty, shape_rewards
from jaxalign.config import PPOConfig
from jaxalign.models.adapters.lora import join, strip_frozen
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, Experience, Rollout
from jaxalign.rewards.scorer import LearntScore, normalised, raw_row_scores
from jaxalign.rl.arguments import ExperienceArguments, OutputArguments
from jaxalign.rl.estimators import AdvantageInputs, estimate, estimator_of
from jaxalign.rl.metrics import ExperienceMetrics, mean_of
from jaxalign.rl.responses import response_hidden, response_kl, response_mask, response_stats, response_values
from jaxalign.rl.state import PPOSetup
from jaxalign.steps.packed import each_part, pack_rollout


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


def make_experience(
    setup: PPOSetup, recompute: bool, reference_params, policy_params, critic_params, kl_coef, rollout: Rollout, scores,
    kept=None, baseline=None, frozen=None,
) -> tuple[Experience, ExperienceMetrics]:
    """(Experience, metrics) for a scored rollout.

    With `setup.values_in_update`, the critic does not run here: values are 0, and advantages and returns are computed from
    zero values until the update replaces them.

    Args:
      setup: models, optimizers and options.
      recompute: use the trainer's log-probabilities as the old ones instead of the sampler's.
      reference_params, policy_params: parameters, joined with `frozen`.
      critic_params: the critic's parameters, joined with `frozen`; the policy's if they share a trunk; None without a critic.
      kl_coef: scalar weight of the KL penalty.
      rollout: B responses of at most N tokens, on the host or on the devices.
      scores: float32 [B] or [B, N], or a `LearntScore`, whose model then runs in the same program.
      kept: bool [B], False for rows whose score was dropped, which get weight 0. None: all rows have a score.
      baseline: float32 [B], the `greedy_baseline` for the same prompts, for an estimator that needs it.
      frozen: the base that models with adapters share, or None.

    Raises:
      UserError: a custom advantage estimator raises, or returns the wrong shape or dtype.
    """
    rollout, parts = pack_rollout(rollout, setup.config.micro_batch_tokens, setup.policy.sharding)
    scorer = scorer_params = None
    if isinstance(scores, LearntScore):
        (scorer, scorer_params), scores = scores, None
    critic_params = None if setup.shares_trunk or setup.values_in_update else critic_params
    return packed_experience(ExperienceArguments(
        setup=setup, recompute=recompute, scorer=scorer, reference_params=strip_frozen(frozen, reference_params),
        policy_params=strip_frozen(frozen, policy_params), critic_params=strip_frozen(frozen, critic_params),
        scorer_params=strip_frozen(frozen, scorer_params), frozen=frozen, kl_coef=kl_coef, rollout=rollout, parts=parts,
        scores=scores, kept=kept, baseline=baseline,
    ))


class Joined(NamedTuple):
    """Parameters joined with the frozen base; None for a model that does not run."""

    reference: object
    policy: object
    critic: object
    scorer: object


def _forward(given: ExperienceArguments, params: Joined, rows: AnswerRows) -> dict[str, jax.Array]:
    """Runs the forward passes over one part, one model after another: log-probabilities, KL, values and scores by name."""
    setup, rollout, sharding = given.setup, given.rollout, given.setup.policy.sharding
    temperature = setup.config.temperature or 1.0
    outputs = {"reference": response_stats(setup.reference, params.reference, rollout, temperature, None, rows).logprobs}
    rows = after(sharding, rows, outputs)
    full_in_reward = setup.config.kl_estimator == "full" and setup.config.kl_in == "reward"
    hidden = response_hidden(setup.policy, params.policy, rows) if given.recompute or full_in_reward else None
    if given.recompute:
        outputs["logprobs"] = response_stats(setup.policy, params.policy, rollout, temperature, hidden, rows).logprobs
    if full_in_reward:
        outputs["kl"] = response_kl(
            setup.policy, params.policy, setup.reference, params.reference, rollout, temperature, hidden, rows
        )
    rows = after(sharding, rows, outputs)
    if setup.runs_critic:
        outputs["values"] = response_values(setup.critic, params.critic, rollout, None, rows)
    if given.scorer is not None:
        rows = after(sharding, rows, outputs)
        outputs["scores"] = normalised(given.scorer, raw_row_scores(given.scorer, params.scorer, rollout, rows))
    return outputs


@MeshProgram
def packed_experience(given: ExperienceArguments) -> tuple[Experience, ExperienceMetrics]:
    """`make_experience` over packed rows: the models run part by part."""
    setup, frozen, rollout = given.setup, given.frozen, given.rollout
    policy, critic = join(frozen, given.policy_params), None
    if setup.runs_critic:
        critic = policy if setup.shares_trunk else join(frozen, given.critic_params)
    scorer = None if given.scorer is None else join(frozen, given.scorer_params)
    params = Joined(join(frozen, given.reference_params), policy, critic, scorer)
    scored = _scored(rollout, given.kept)
    outputs = each_part(given.parts, functools.partial(_forward, given, params))
    rollout, scored, scores, baseline = after(
        setup.policy.sharding, (rollout, scored, given.scores, given.baseline), outputs
    )
    return _from_outputs(setup, outputs, rollout, scored, outputs.get("scores", scores), baseline, given.kl_coef)


@MeshProgram
def experience_of(given: OutputArguments) -> tuple[Experience, ExperienceMetrics]:
    """`make_experience` from the outputs of models that ran in programs of their own."""
    scored = _scored(given.rollout, given.kept)
    return _from_outputs(given.setup, given.outputs, given.rollout, scored, given.scores, given.baseline, given.kl_coef)


def _scored(rollout: Rollout, kept) -> jax.Array:
    """bool [B]: the rows that are not padding and have a score."""
    chex.assert_rank([rollout.tokens, rollout.logprobs], 2)
    chex.assert_equal_shape([rollout.prompt_length, rollout.response_length, rollout.ended])
    real = rollout.prompt_length > 0
    return real if kept is None else real & kept


def _from_outputs(
    setup: PPOSetup, outputs: Mapping[str, jax.Array], rollout: Rollout, scored, scores, baseline, kl_coef
) -> tuple[Experience, ExperienceMetrics]:
    """The result of `make_experience`.

    Args:
      outputs: float32 [B, N] each: "reference" and, where `_forward` computes them, "logprobs", "kl" and "values".
      scored: bool [B], see `_scored`.
      scores, baseline, kl_coef: as in `make_experience`; no `LearntScore`.
    """
    config, mask = setup.config, response_mask(rollout) > 0

    def zeroed(x):
        return jnp.where(mask, x, 0.0)

    # An empty response does not count in its group.
    kept = scored & jnp.any(mask, axis=1)
    chex.assert_rank(scores, {1, 2})
    chex.assert_shape([kept, scores], [mask.shape[:1], mask.shape[: scores.ndim]])
    scores = jnp.where(scored if scores.ndim == 1 else scored[:, None] & mask, scores, 0.0)
    reference = zeroed(outputs["reference"])
    logprobs = zeroed(outputs["logprobs"]) if "logprobs" in outputs else rollout.logprobs
    chex.assert_equal_shape([reference, logprobs, mask])
    values = zeroed(outputs["values"]) if setup.runs_critic else jnp.zeros_like(reference)
    if config.kl_estimator != "full":
        limit = config.log_ratio_limit if config.kl_estimator == "k3" else None
        kl = zeroed(kl_penalty(limit_log_ratio(logprobs, reference, limit), reference, config.kl_estimator))
    elif config.kl_in == "reward":
        kl = zeroed(outputs["kl"])
    else:  # The loss computes it.
        kl = jnp.zeros_like(reference)
    kl_coef = kl_coef if config.kl_in == "reward" else 0.0
    rewards = token_rewards(config, rollout, scores, kl, kl_coef, config.overlong_buffer)
    if config.skip_equal_groups:
        without_kl = jnp.sum(token_rewards(config, rollout, scores, jnp.zeros_like(kl), 0.0, 0), axis=1)
        kept = kept & informative_groups(without_kl, config.group_size, kept)
    counted = mask & kept[:, None]
    log_ratios = logprobs - rollout.logprobs
    settled = rewards
    if config.kl_in == "reward" and estimator_of(config).needs_groups:
        rounding = kl_coef * 4 * jnp.finfo(kl.dtype).eps * masked_sum(jnp.abs(logprobs) + jnp.abs(reference), mask, axis=1)
        settled = level_equal_groups(config, rollout, scores, rewards, rounding, kept)
    advantages, returns = estimate(AdvantageInputs(settled, values, log_ratios, counted, kept, baseline, config))
    metrics = _metrics(config, rollout, scored, kept, mask, scores, rewards, logprobs, reference, kl)
    if setup.recomputes:
        metrics = dataclasses.replace(metrics, sampler_gap=jnp.max(jnp.where(mask, jnp.abs(log_ratios), 0)))
    importance, outside, share = _importance(config, logprobs, rollout.logprobs, mask, counted, kept)
    metrics = dataclasses.replace(metrics, correction_outside=outside, effective_sample_share=share)
    rollout = dataclasses.replace(rollout, logprobs=logprobs)
    experience = Experience(rollout, kept.astype(jnp.float32), reference, values, rewards, advantages, returns, importance)
    # With a fixed sharding, the programs that read the result can be compiled ahead.
    return setup.policy.constrain_rows(experience), metrics


def _metrics(
    config: PPOConfig, rollout: Rollout, scored, kept, mask, scores, rewards, logprobs, reference, kl
) -> ExperienceMetrics:
    """Metrics of the rollout without those of importance weights: means over its scored responses, except the counts `kept`,
    `no_score` and `tokens`."""
    full_in_reward = config.kl_estimator == "full" and config.kl_in == "reward"
    k1, k3 = (masked_sum(kl_penalty(logprobs, reference, kind), mask, axis=1) for kind in ("k1", "k3"))

    def mean(x):
        return mean_of(x, scored)

    scores = scores if scores.ndim == 1 else jnp.sum(scores, axis=1)
    return ExperienceMetrics(
        score=mean(scores),
        score_std=jnp.sqrt(mean(jnp.square(scores - mean(scores)))),
        reward=mean(jnp.sum(rewards, axis=1)),
        kl_k1=mean(k1),
        kl_k3=mean(k3),
        response_length=mean(rollout.response_length),
        eos_rate=mean(rollout.ended),
        kept=jnp.sum(kept).astype(jnp.float32),
        no_score=jnp.sum((rollout.prompt_length > 0) & ~scored).astype(jnp.float32),
        tokens=jnp.sum(rollout.response_length).astype(jnp.float32),
        kl_full=mean(masked_sum(kl, mask, axis=1)) if full_in_reward else None,
        score_changed=None if config.missing_eos == "none" else mean(~rollout.ended),
    )


def _importance(config: PPOConfig, logprobs, sampled, mask, counted, kept):
    """(importance weights [B, N] of the trainer's over the sampler's probabilities, correction_outside,
    effective_sample_share); the shares are NaN if no response counts."""
    if config.sampler_correction == "none":
        return mask.astype(jnp.float32), None, None
    importance, weights = importance_weights(
        logprobs, sampled, mask, config.correction_level, config.sampler_correction, high=config.correction_cap
    )
    each = (importance, counted) if config.correction_level == "token" else (importance[:, 0], kept)
    shares = masked_mean(weights.outside.astype(jnp.float32), counted), effective_sample_share(*each)
    return importance, *(jnp.where(jnp.any(kept), share, jnp.nan) for share in shares)
