"""The five checks before the first update. Policy and reference are still equal, so the exact results are known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.kl import kl_penalty
from jaxalign.config import PPOConfig
from jaxalign.models.adapters.lora import join, strip_frozen
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import dependent
from jaxalign.parallel.rows import fetch
from jaxalign.records import Experience, PackedParts, Rollout
from jaxalign.rl.arguments import StepZeroArguments
from jaxalign.rl.checks import (
    Check,
    check_of,
    gap_check,
    gradient_tolerance,
    gradients_check,
    ratio_check,
    ratio_tolerance,
    sampler_tolerance,
)
from jaxalign.rl.losses import policy_loss, totals
from jaxalign.rl.responses import logprobs_by_parts, response_hidden, response_kl, response_mask, response_stats
from jaxalign.rl.state import PPOSetup
from jaxalign.steps.loss_scale import LossScale, first_scale
from jaxalign.steps.microbatch import accumulate
from jaxalign.steps.packed import alone, answer_parts, pack_answers, pack_groups, part_rows, place_parts, rows_split

KL_TEMPERATURES = (0.7, 1.0, 1.3)


class StepZeroValues(NamedTuple):
    """The values that `step_zero_checks` compares with tolerances, float32 [] each.

    Attributes:
      ratio: the largest |ratio - 1|.
      kl: the largest |KL| of a response over several temperatures.
      gap: the largest difference between the sampler's and the trainer's log-probs.
      micro_batches: the relative difference in loss and gradients between one batch and micro-batches.
      not_finite: the share of the gradient's entries that are not finite.
    """

    ratio: jax.Array
    kl: jax.Array
    gap: jax.Array
    micro_batches: jax.Array
    not_finite: jax.Array


@functools.partial(MeshProgram, overlap=False)
def step_zero_values(given: StepZeroArguments) -> StepZeroValues:
    """Takes the measurements one after another, so that the memory of each is freed before the next."""
    setup, frozen, experience = given.setup, given.frozen, given.experience
    params, reference_params = join(frozen, given.params), join(frozen, given.reference_params)
    rollout, mask = experience.rollout, response_mask(experience.rollout)
    temperature = setup.config.temperature or 1.0
    mask = mask * (rollout.prompt_length > 0)[:, None]
    mine = logprobs_by_parts(setup.policy, params, rollout, temperature, given.parts)
    ratio = jnp.max(jnp.abs(jnp.exp(mine - rollout.logprobs) - 1.0) * mask)
    gap = jnp.max(jnp.abs(jnp.where(mask > 0, mine - given.sampled, 0)))
    rows = len(given.packed.part)
    part = setup.policy.constrain_rows(jax.tree.map(lambda x: x[:rows], experience))
    part = dependent(part, (part, ratio, gap))
    kl = _largest_kl(setup, params, reference_params, part.rollout, temperature)
    part = dependent(part, kl)
    micro_batches, not_finite = _compare_gradients(given, part, reference_params)
    return StepZeroValues(ratio, kl, gap, micro_batches, not_finite)


def _largest_kl(setup: PPOSetup, params, reference_params, rollout: Rollout, temperature: float) -> jax.Array:
    """float32 []: the largest |KL| of a response to the reference, over `KL_TEMPERATURES` and the sampling temperature."""
    kl, mask = jnp.float32(0.0), response_mask(rollout)
    hidden = response_hidden(setup.policy, params, alone(rollout))
    rollout = dependent(rollout, hidden)
    reference_hidden = response_hidden(setup.reference, reference_params, alone(rollout))
    rollout = dependent(rollout, reference_hidden)
    for at in dict.fromkeys((*KL_TEMPERATURES, temperature)):
        ours = response_stats(setup.policy, params, rollout, at, hidden).logprobs
        theirs = response_stats(setup.reference, reference_params, rollout, at, reference_hidden).logprobs
        kl = jnp.maximum(kl, jnp.max(jnp.sum(kl_penalty(ours, theirs, "abs") * mask, axis=1)))
        rollout = dependent(rollout, kl)
        if setup.config.kl_estimator == "full":
            full = response_kl(setup.policy, params, setup.reference, reference_params, rollout, at, hidden)
            kl = jnp.maximum(kl, jnp.max(jnp.sum(jnp.abs(full) * mask, axis=1)))
    return kl


def _compare_gradients(given: StepZeroArguments, part: Experience, reference_params) -> tuple[jax.Array, jax.Array]:
    """(relative difference in loss and gradients between one batch and micro-batches, share of non-finite entries)."""
    setup, frozen = given.setup, given.frozen
    reference = reference_params if setup.loss_reads_reference else None
    counts = totals(setup, part)

    def loss_fn(params, part):
        return policy_loss(
            setup, params, part[0], counts, given.kl_coef, reference_params=reference, rows=part[1]
        )

    def gradients(scale, packed=None, first=()):
        def in_use(tree, part):
            return setup.policy.in_use(tree, (first, part))

        parts = answer_parts(part, packed)
        return accumulate(loss_fn, given.params, parts, setup.policy.constrain_gradients, scale, frozen, in_use)

    loss_scale = _fitting_scale(lambda scale: gradients(scale)[1], setup.policy)
    (whole, _), whole_gradients = gradients(loss_scale)
    packed = dependent(given.packed, whole_gradients)
    (parts, _), part_gradients = gradients(loss_scale, packed, whole_gradients)
    difference = _largest(jax.tree.map(jnp.subtract, whole_gradients, part_gradients))
    scale = jnp.maximum(_largest(whole_gradients), 1e-8)
    loss_gap = jnp.maximum(jnp.abs(whole - parts) / jnp.maximum(jnp.abs(whole), 1e-2), difference / scale)
    return loss_gap, share_not_finite(whole_gradients)


def _largest(tree) -> jax.Array:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))


def share_not_finite(gradients) -> jax.Array:
    """float32 []: the share of entries that are not finite.

    Shares are added over arrays, since the number of entries of a large model would overflow int32.
    """
    leaves = jax.tree.leaves(gradients)
    total = sum(x.size for x in leaves)
    return sum(jnp.mean(~jnp.isfinite(x), dtype=jnp.float32) * (x.size / total) for x in leaves)


def _fitting_scale(gradients_of: Callable, model: Model) -> LossScale | None:
    """The largest loss scale under which these gradients are finite, found by halving from the initial scale, and at least 1.

    Training would find it by skipping updates. None for a model that needs no loss scale.
    """
    start = first_scale(model)
    if start is None:
        return None

    def measured(scale: LossScale) -> tuple[LossScale, jax.Array]:
        return scale, share_not_finite(gradients_of(scale)) == 0

    return jax.lax.while_loop(
        lambda carry: ~carry[1] & (carry[0].scale > 1),
        lambda carry: measured(carry[0].after(jnp.bool_(False))),
        measured(start),
    )[0]


def checked_rows(section: PPOConfig, batch: int, T: int, ways: int = 1, unit: int = 1) -> tuple[int, int, int]:
    """The size of the gradient check.

    Args:
      section: `config.ppo`.
      batch: the number of responses per iteration.
      T: the number of tokens in a packed row.
      ways, unit: see `training.packed.rows_split`.

    Returns:
      (the number of rows to check, rows per part, the largest number of parts).
    """
    part, _ = part_rows(batch // section.minibatches, T, section.micro_batch_tokens, ways, unit)
    rows = min(batch, math.lcm(part, 2 * ways))
    split = -(-rows // (2 * ways)) * ways
    return rows, split, -(-rows // split)


def checked_parts(setup: PPOSetup, rollout: Rollout) -> PackedParts:
    """The first rows of a rollout (numpy), packed into two parts if there are enough rows.

    There are as many rows as in a micro-batch of the update, which fits into memory, or twice as many if the mesh needs them to
    form two parts.
    """
    B, T = rollout.tokens.shape
    sharding = setup.policy.sharding
    rows, split, most = checked_rows(setup.config, B, T, *rows_split(sharding))
    tokens, prompts, answers = (x[:rows] for x in (rollout.tokens, rollout.prompt_length, rollout.response_length))
    plan = pack_answers(tokens, prompts, answers, [np.arange(rows)], prompts > 0, split, most)
    return place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


def step_zero_checks(
    setup: PPOSetup, reference_params, policy_params, sampled: Rollout, experience: Experience, kl_coef, frozen=None
) -> tuple[Check, ...]:
    """Runs the five checks. Call it before the first update.

    Args:
      setup: models, optimizers and options.
      reference_params: the reference's parameters, joined with `frozen`.
      policy_params: the policy's parameters, without `frozen`.
      sampled: the rollout with the sampler's log-probabilities.
      experience: the experience, whose rollout has the old log-probabilities in use.
      kl_coef: the weight of the KL penalty.
      frozen: the base that models with adapters share, or None.
    """
    rollout = fetch(experience.rollout)
    every, real = [np.arange(len(rollout.tokens))], rollout.prompt_length > 0
    parts = pack_groups(rollout, every, real, setup.config.micro_batch_tokens, setup.policy.sharding)
    measured = StepZeroValues(*map(float, step_zero_values(StepZeroArguments(
        setup=setup, params=policy_params, frozen=frozen, reference_params=strip_frozen(frozen, reference_params),
        experience=experience, kl_coef=kl_coef, parts=jax.tree.map(lambda x: x[0], parts),
        packed=checked_parts(setup, rollout), sampled=sampled.logprobs,
    ))))
    setting = setup.config.sampler_tolerance
    # New DoRA adapters scale each output by a norm divided by itself, which rounds to about 1 at every token.
    kl_limit = 1e-5 * (sampled.logprobs.shape[1] if setup.policy.lora is not None and setup.policy.lora.dora else 1)
    return (
        ratio_check(measured.ratio, ratio_tolerance(setting, setup.policy)),
        check_of("reference KL", measured.kl, kl_limit, "largest |KL| of a response against an equal reference at temperatures "
                 f"{', '.join(map(str, KL_TEMPERATURES))} and the sampling one: above this, the two are not treated alike, or "
                 "do not start from the same weights"),
        gap_check(measured.gap, sampler_tolerance(setting, setup.policy)),
        check_of("micro-batches", measured.micro_batches, gradient_tolerance(setup.policy),
                 "relative difference of loss and gradients between responses apart and packed into micro-batches: above this, "
                 "something is divided by the counts of a part, or responses of one row see each other"),
        gradients_check(measured.not_finite, "share of the policy's gradient that is not finite before any update"),
    )
