"""What must be right at step 0 (Decision 9) and at every step of RL, and what follows where it is not."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.kl import kl_penalty
from jaxalign.config import Checks, OnlineChecks, Ppo
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import apart, join
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.parallel.rows import fetch
from jaxalign.records import Experience, PackedParts, Rollout
from jaxalign.rl.experience import response_hidden, response_kl, response_mask, response_stats
from jaxalign.rl.state import PPOSetup
from jaxalign.rl.update import experience_parts, policy_loss, totals
from jaxalign.training.loss_scale import LossScale, first_scale, scales_loss
from jaxalign.training.microbatch import accumulate
from jaxalign.training.packed import alone, pack_answers, part_rows, place_parts, rows_split

KL_TEMPERATURES = (0.7, 1.0, 1.3)


@dataclasses.dataclass(frozen=True)
class Check:
    """One run-time check: its measured value, what it may be at most, and what a failure means, with its likely cause."""

    name: str
    value: float
    tolerance: float
    passed: bool
    meaning: str

    @property
    def field(self) -> str:
        """The field of the stage's section `checks` that rules it."""
        return self.name.lower().replace(" ", "_").replace("-", "_")


def _check(name: str, value: float, tolerance: float, meaning: str) -> Check:
    return Check(name, value, tolerance, bool(value <= tolerance), meaning)


class SamplerDifference(NamedTuple):
    """float32 [] each, largest over the response tokens: |trainer's - sampler's log-prob|, in nats, and |ratio - 1|."""

    gap: jax.Array
    ratio: jax.Array


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def sampler_difference(model: Model, temperature: float, params, rollout: Rollout) -> SamplerDifference:
    """How far the sampler's log-probs are from the trainer's."""
    mine = response_stats(model, params, rollout, temperature or 1.0).logprobs
    difference = jnp.where(response_mask(rollout) > 0, mine - rollout.logprobs, 0)
    return SamplerDifference(jnp.max(jnp.abs(difference)), jnp.max(jnp.abs(jnp.expm1(difference))))


def ratio_check(value: float, tolerance: float, when: str = "") -> Check:
    meaning = (f"largest |ratio - 1| before any update{when}: above this, old log-probs are not the policy's, as where the "
               "sampler's weights or numbers differ from the trainer's")  # fmt: skip
    return _check("ratio", value, tolerance, meaning)


def gap_check(value: float, tolerance: float, when: str = "") -> Check:
    meaning = (f"largest difference of the sampler's and the trainer's log-probs{when}, nats a token: above this, the two "
               "round differently (a narrow compute_dtype) or do not have the same weights")  # fmt: skip
    return _check("sampler gap", value, tolerance, meaning)


def unexplained(metrics) -> jax.Array:
    """`skipped` less what is no fault: in float16 now and then a gradient overflows, which halves the loss scale and is mended
    by that. A loss that is not finite, or gradients that are not even where the scale is down to 1, still count."""
    return metrics["skipped"] - metrics["overflowed"] if "overflowed" in metrics else metrics["skipped"]


def gradients_check(value: float, when: str) -> Check:
    """value: the share that is not finite, of updates as `unexplained` counts them."""
    return _check("finite gradients", value, 0.0, f"{when}: rewards or log-probs that are not finite or far too large, or a "
                  "learning rate too high before it; such updates are left out")


@functools.partial(jax.jit, static_argnames=("setup",))
def step_zero_values(
    setup: PPOSetup, own_params, frozen, reference_params, experience: Experience, kl_coef, packed: PackedParts, sampled
):
    """What `step_zero_checks` judges, float32 [] each: ratio, KL, gap of the sampler's log-probs, gap of the micro-batches,
    share that is not finite.

    reference_params: without `frozen`; packed: the first of the experience's rows, as many as the KL and the gradients are
    checked on, in micro-batches; sampled: the sampler's own log-probs, float32 [B, N].
    """
    policy_params, reference_params = join(frozen, own_params), join(frozen, reference_params)
    rollout, mask = experience.rollout, response_mask(experience.rollout)
    temperature = setup.config.temperature or 1.0
    sharding = setup.policy.sharding
    mine = response_stats(setup.policy, policy_params, rollout, temperature).logprobs
    ratio = jnp.max(jnp.abs(jnp.exp(mine - rollout.logprobs) - 1.0) * mask)
    gap = jnp.max(jnp.abs(jnp.where(mask > 0, mine - sampled, 0)))
    rows = len(packed.part)
    part = setup.policy.constrain_rows(jax.tree.map(lambda x: x[:rows], experience))
    part = after(sharding, part, (part, ratio, gap))
    kl, rollout, mask = jnp.float32(0.0), part.rollout, response_mask(part.rollout)
    hidden = response_hidden(setup.policy, policy_params, alone(rollout))
    rollout = after(sharding, rollout, hidden)
    reference_hidden = response_hidden(setup.reference, reference_params, alone(rollout))
    rollout = after(sharding, rollout, reference_hidden)
    for at in dict.fromkeys((*KL_TEMPERATURES, temperature)):
        ours = response_stats(setup.policy, policy_params, rollout, at, hidden).logprobs
        theirs = response_stats(setup.reference, reference_params, rollout, at, reference_hidden).logprobs
        kl = jnp.maximum(kl, jnp.max(jnp.sum(kl_penalty(ours, theirs, "abs") * mask, axis=1)))
        rollout = after(sharding, rollout, kl)
        if setup.config.kl_estimator == "full":
            full = response_kl(setup, policy_params, reference_params, rollout, at, hidden)
            kl = jnp.maximum(kl, jnp.max(jnp.sum(jnp.abs(full) * mask, axis=1)))
    reference = reference_params if setup.loss_reads_reference else None
    part = after(sharding, part, kl)
    counts = totals(setup, part)

    def loss_fn(params, part):
        return policy_loss(setup, join(frozen, params), part[0], counts, kl_coef, reference_params=reference, rows=part[1])

    def gradients(scale, packed=None):
        return accumulate(loss_fn, own_params, experience_parts(part, packed), setup.policy.constrain_gradients, scale)

    loss_scale = _fitting_scale(lambda scale: gradients(scale)[1], setup.policy)
    (whole, _), whole_gradients = gradients(loss_scale)
    packed = after(sharding, packed, whole_gradients)
    (parts, _), part_gradients = gradients(loss_scale, packed)
    largest = lambda tree: jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))  # noqa: E731
    difference = largest(jax.tree.map(jnp.subtract, whole_gradients, part_gradients))
    scale = jnp.maximum(largest(whole_gradients), 1e-8)
    spoilt = _spoilt(whole_gradients)
    loss_gap = jnp.maximum(jnp.abs(whole - parts) / jnp.maximum(jnp.abs(whole), 1e-2), difference / scale)
    return ratio, kl, gap, loss_gap, spoilt


def checked_rows(section: Ppo, batch: int, T: int, ways: int = 1, unit: int = 1) -> tuple[int, int, int]:
    """(how many rows of T tokens the gradients of step 0 are checked on, the rows of a part of them, the most parts)."""
    part, _ = part_rows(batch // section.minibatches, T, section.micro_batch_tokens, ways, unit)
    rows = min(batch, math.lcm(part, 2 * ways))
    split = -(-rows // (2 * ways)) * ways
    return rows, split, -(-rows // split)


def checked_parts(setup: PPOSetup, rollout: Rollout) -> PackedParts:
    """The first rows of a rollout, packed: a micro-batch of them, which is what the update has room for, or as many as two
    parts can be split over the mesh; in two parts, where they need as much."""
    B, T = rollout.tokens.shape
    sharding = setup.policy.sharding
    rows, split, most = checked_rows(setup.config, B, T, *rows_split(sharding))
    tokens, prompts, answers = (x[:rows] for x in (rollout.tokens, rollout.prompt_length, rollout.response_length))
    plan = pack_answers(tokens, prompts, answers, [np.arange(rows)], prompts > 0, split, most)
    return place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


def _spoilt(gradients) -> jax.Array:
    """float32 []: the share of the numbers that is not finite. No count of them is formed: of a large model it is more than
    an int32 holds, and would come out as a share below 0 or of 0."""
    leaves = jax.tree.leaves(gradients)
    total = sum(x.size for x in leaves)
    return sum(jnp.mean(~jnp.isfinite(x), dtype=jnp.float32) * (x.size / total) for x in leaves)


def _fitting_scale(gradients_of: Callable, model: Model) -> LossScale | None:
    """The largest loss scale from the first one down under which these gradients are finite, at least 1: where training would
    get to by itself. None for a model without one."""
    if not scales_loss(model):
        return None
    start, fits = first_scale(), lambda scale: _spoilt(gradients_of(scale)) == 0
    halve = lambda found: (found[0].after(jnp.bool_(False)), fits(found[0].after(jnp.bool_(False))))  # noqa: E731
    return jax.lax.while_loop(lambda found: ~found[1] & (found[0].scale > 1), halve, (start, fits(start)))[0]


def step_zero_checks(
    setup: PPOSetup, reference_params, policy_params, sampled: Rollout, experience: Experience, kl_coef, frozen=None
) -> tuple[Check, ...]:
    """The five checks as a tuple of `Check`s, to be run before the first update, when policy and reference are equal.

    `sampled` is the rollout as the sampler gave it; `experience` holds the old log-probs in use. With `frozen`
    policy_params are those that are trained.
    """
    packed = checked_parts(setup, fetch(experience.rollout))
    reference = apart(frozen, reference_params)
    measured = step_zero_values(setup, policy_params, frozen, reference, experience, kl_coef, packed, sampled.logprobs)
    ratio, kl, gap, loss_gap, spoilt = (float(x) for x in measured)
    config = setup.config
    # Fresh DoRA scales each output by a length over itself, which is 1 but for rounding, at every token.
    kl_limit = 1e-5 * (sampled.logprobs.shape[1] if setup.policy.lora is not None and setup.policy.lora.dora else 1)
    return (
        ratio_check(ratio, config.sampler_tolerance),
        _check("reference KL", kl, kl_limit, "largest |KL| of a response against an equal reference at temperatures "
               f"{', '.join(map(str, KL_TEMPERATURES))} and the sampling one: above this, the two are not treated alike, or do "
               "not start from the same weights"),
        gap_check(gap, config.sampler_tolerance),
        _check("micro-batches", loss_gap, 1e-3 if setup.policy.config.compute_dtype == "float32" else 5e-2,
               "relative difference of loss and gradients between responses apart and packed into micro-batches: above this, "
               "something is divided by the counts of a part, or responses of one row see each other"),
        gradients_check(spoilt, "share of the policy's gradient that is not finite before any update"),
    )  # fmt: skip


def act_on(checks: tuple[Check, ...], policies: Checks | OnlineChecks, stage: str) -> bool:
    """Does with each failed check what `policies` say: warns, or raises UserError; whether old log-probs must be recomputed."""
    recompute = False
    for check in checks:
        if check.passed:
            continue
        text = (
            f"{stage}: check '{check.name}' is {check.value:.3g}, above its tolerance {check.tolerance:.3g} "
            f"({check.meaning})"
        )
        policy = dataclasses.asdict(policies)[check.field]
        if policy == "stop":
            raise UserError(f"{text}; config.{stage}.checks.{check.field} is 'stop'")
        if policy == "recompute":
            recompute = True
            text += "; the old log-probabilities are computed again"
        logging.getLogger("jaxalign").warning(text)
    return recompute
