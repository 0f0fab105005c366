"""From a rollout to experience: scores, log-probs, values, rewards and advantages, in one jitted call over packed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.groups import informative_groups
from jaxalign.algorithms.importance import effective_sample_share, importance_weights
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.masked import masked_mean, masked_sum
from jaxalign.algorithms.rewards import overlong_penalty, shape_rewards
from jaxalign.config import Ppo
from jaxalign.models.adapters.lora import apart, join
from jaxalign.models.heads import TokenStats, gather_positions, length_mask, token_kl
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, Experience, PackedParts, Rollout
from jaxalign.rewards.scorer import LearntScore, Scorer, normalised, raw_row_scores
from jaxalign.rl.estimators import AdvantageInputs, estimate
from jaxalign.rl.state import PPOSetup
from jaxalign.training.packed import alone, each_part, of_answers, pack_rollout


def response_hidden(model: Model, params, rows: AnswerRows):
    """The trunk's last hidden states [R, T, D]."""
    return model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)


def response_stats(
    model: Model, params, rollout: Rollout, temperature: float, hidden=None, rows: AnswerRows | None = None
) -> TokenStats:
    """Log-probs and entropies [B, N] of the response's tokens, at the sampling temperature: the same for the policy and
    its reference, so that equal weights give a KL of 0 (Pitfall 2). The head sees response positions only.

    rows: where the rollout's rows stand; None: each in a row of its own. hidden: what `response_hidden` gives for them, where
    it is known. Numbers behind a response's end mean nothing, here and in the two functions that follow.
    """
    rows = alone(rollout) if rows is None else rows
    hidden = response_hidden(model, params, rows) if hidden is None else hidden
    targets = gather_positions(rows.tokens, rows.heads + 1)
    stats = model.token_stats(params, gather_positions(hidden, rows.heads), targets, temperature, rows.used)
    return TokenStats(*(of_answers(x, rows.first, rollout.logprobs.shape[1]) for x in stats))


def response_kl(
    setup: PPOSetup, params, reference_params, rollout: Rollout, temperature: float, hidden=None, rows: AnswerRows | None = None
):
    """The whole KL(policy || reference) [B, N] at the state before each response token, with its gradient into params."""
    rows = alone(rollout) if rows is None else rows
    hidden = response_hidden(setup.policy, params, rows) if hidden is None else hidden
    reference_rows = after(setup.policy.sharding, rows, hidden)
    reference = jax.lax.stop_gradient(response_hidden(setup.reference, reference_params, reference_rows))
    hidden, reference = (gather_positions(x, rows.heads) for x in (hidden, reference))
    weights = setup.policy.head_weight(params, hidden.dtype), setup.reference.head_weight(reference_params, reference.dtype)
    room, cap, constrain = setup.policy.chunk_floats, setup.policy.config.final_softcap, setup.policy.constrain
    found = token_kl(hidden, weights[0], reference, weights[1], temperature, room, cap, constrain, rows.used)
    return of_answers(found, rows.first, rollout.logprobs.shape[1])


def response_values(model: Model, params, rollout: Rollout, hidden=None, rows: AnswerRows | None = None):
    """The critic's value [B, N] of the state before each response token."""
    rows = alone(rollout) if rows is None else rows
    values = model.scores(params, response_hidden(model, params, rows) if hidden is None else hidden)
    return of_answers(values, rows.start + rollout.prompt_length - 1, rollout.logprobs.shape[1])


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


def make_experience(
    setup: PPOSetup, recompute: bool, reference_params, policy_params, critic_params, kl_coef, rollout: Rollout, scores,
    kept=None, baseline=None, frozen=None,
):  # fmt: skip
    """(Experience, metrics) of a scored rollout.

    scores float32 [B], or the `LearntScore` that gives them; kept bool [B] or None: rows whose score was dropped do not count;
    baseline float32 [B], the `greedy_baseline` of the same prompts, for "remax". critic_params are None without a critic, and
    the policy's where it is a head of the policy's. With `recompute` the old log-probs are the trainer's, not the sampler's.
    frozen: the base that models with adapters share; all parameters are joined with it.

    Where `setup.values_in_update` the critic is not run: values are 0, and advantages and returns what they are of such.
    """
    rollout, parts = pack_rollout(rollout, setup.config.micro_batch_tokens, setup.policy.sharding)
    scorer = scorer_params = None
    if isinstance(scores, LearntScore):
        (scorer, scorer_params), scores = scores, None
    critic_params = None if setup.shares_trunk or setup.values_in_update else critic_params
    own = (apart(frozen, params) for params in (reference_params, policy_params, critic_params))
    return packed_experience(
        setup, recompute, scorer, *own, kl_coef, rollout, parts, scores, kept, baseline, apart(frozen, scorer_params), frozen
    )


@functools.partial(jax.jit, static_argnames=("setup", "recompute", "scorer"))
def packed_experience(
    setup: PPOSetup, recompute: bool, scorer: Scorer | None, reference_params, policy_params, critic_params, kl_coef,
    rollout: Rollout, parts: PackedParts, scores, kept=None, baseline=None, scorer_params=None, frozen=None,
):  # fmt: skip
    """`make_experience` over packed rows: all models run here, part by part. Parameters are without `frozen`, and
    critic_params None where the policy's have the critic's head, for nothing is passed twice, or where it is not run."""
    reference_params, policy_params = join(frozen, reference_params), join(frozen, policy_params)
    if setup.runs_critic:
        critic_params = policy_params if setup.shares_trunk else join(frozen, critic_params)
    if scorer is not None:
        scorer_params = join(frozen, scorer_params)
    config, sharding = setup.config, setup.policy.sharding
    real = rollout.prompt_length > 0
    scored = real if kept is None else real & kept
    temperature = config.temperature or 1.0
    full_in_reward = config.kl_estimator == "full" and config.kl_in == "reward"

    def forward(rows: AnswerRows) -> dict[str, jax.Array]:
        found = {"reference": response_stats(setup.reference, reference_params, rollout, temperature, None, rows).logprobs}
        rows = after(sharding, rows, found)
        hidden = response_hidden(setup.policy, policy_params, rows) if recompute or full_in_reward else None
        if recompute:
            found["logprobs"] = response_stats(setup.policy, policy_params, rollout, temperature, hidden, rows).logprobs
        if full_in_reward:
            found["kl"] = response_kl(setup, policy_params, reference_params, rollout, temperature, hidden, rows)
        rows = after(sharding, rows, found)
        if setup.runs_critic:
            found["values"] = response_values(setup.critic, critic_params, rollout, None, rows)
        if scorer is not None:
            rows = after(sharding, rows, found)
            found["scores"] = normalised(scorer, raw_row_scores(scorer, scorer_params, rollout, rows))
        return found

    found = each_part(parts, forward)
    rollout, scored, scores, baseline = after(sharding, (rollout, scored, scores, baseline), found)
    mask = response_mask(rollout) > 0
    zeroed = lambda x: jnp.where(mask, x, 0.0)  # noqa: E731
    # A response without a token belongs to no group.
    kept, scores = scored & jnp.any(mask, axis=1), jnp.where(scored, found["scores"] if scorer is not None else scores, 0.0)
    reference = zeroed(found["reference"])
    logprobs = zeroed(found["logprobs"]) if recompute else rollout.logprobs
    values = zeroed(found["values"]) if setup.runs_critic else jnp.zeros_like(reference)
    if config.kl_estimator != "full":
        kl = zeroed(kl_penalty(logprobs, reference, config.kl_estimator))
    elif config.kl_in == "reward":
        kl = zeroed(found["kl"])
    else:  # It is measured where it is learnt from, in the loss.
        kl = jnp.zeros_like(reference)
    rewards = _rewards(config, rollout, scores, kl, kl_coef if config.kl_in == "reward" else 0.0, config.overlong_buffer)
    if config.skip_equal_groups:
        settled = jnp.sum(_rewards(config, rollout, scores, jnp.zeros_like(kl), 0.0, 0), axis=1)
        kept = kept & informative_groups(settled, config.group_size, kept)
    counted = mask & kept[:, None]
    log_ratios = logprobs - rollout.logprobs
    inputs = AdvantageInputs(rewards, values, log_ratios, counted, kept, baseline, config)
    advantages, returns = estimate(inputs)
    k1, k3 = (masked_sum(kl_penalty(logprobs, reference, kind), mask, axis=1) for kind in ("k1", "k3"))
    mean = lambda x: masked_mean(x.astype(jnp.float32), scored)  # noqa: E731
    metrics = {
        "score": mean(scores), "reward": mean(jnp.sum(rewards, axis=1)), "kl_k1": mean(k1), "kl_k3": mean(k3),
        "response_length": mean(rollout.response_length), "eos_rate": mean(rollout.ended),
        "kept": jnp.sum(kept).astype(jnp.float32), "tokens": jnp.sum(rollout.response_length).astype(jnp.float32),
    }  # fmt: skip
    if full_in_reward:
        metrics["kl_full"] = mean(masked_sum(kl, mask, axis=1))
    if setup.recomputes:
        metrics["sampler_gap"] = jnp.max(jnp.where(mask, jnp.abs(log_ratios), 0))
    importance, found = _importance(config, logprobs, rollout.logprobs, mask, counted, kept)
    metrics |= found
    rollout = Rollout(rollout.tokens, rollout.prompt_length, rollout.response_length, logprobs, rollout.ended)
    made = Experience(rollout, kept.astype(jnp.float32), reference, values, rewards, advantages, returns, importance)
    return setup.policy.constrain_rows(made), metrics  # So that who compiles what reads it knows where it lies.


def _importance(config: Ppo, logprobs, sampled, mask, counted, kept):
    """(weights [B, N] of tokens by the policy's log-probs and those they were sampled with, metrics)."""
    if config.sampler_correction == "none":
        return mask.astype(jnp.float32), {}
    importance, weights = importance_weights(
        logprobs, sampled, mask, config.correction_level, config.sampler_correction, high=config.correction_cap
    )
    each = (importance, counted) if config.correction_level == "token" else (importance[:, 0], kept)
    return importance, {
        "correction_outside": masked_mean(weights.outside.astype(jnp.float32), counted),
        "effective_sample_share": effective_sample_share(*each),
    }
