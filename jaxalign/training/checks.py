"""The four numbers that must be right at step 0 (Decision 9), and the sampler's gap at every step."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp

from jaxalign.algorithms.kl import kl_penalty
from jaxalign.errors import UserError
from jaxalign.models.lora import join
from jaxalign.records import Experience, Rollout
from jaxalign.training.experience import response_kl, response_mask, response_stats
from jaxalign.training.microbatch import accumulate
from jaxalign.training.ppo_state import PPOSetup
from jaxalign.training.ppo_step import policy_loss, totals

KL_TEMPERATURES = (0.7, 1.0, 1.3)
CHECKED_MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Check:
    """One run-time check: its measured value, what it may be at most, and what a failure means."""

    name: str
    value: float
    tolerance: float
    passed: bool
    meaning: str


@functools.partial(jax.jit, static_argnames=("setup",))
def sampler_gap(setup: PPOSetup, params, rollout: Rollout) -> jax.Array:
    """Largest absolute difference, in nats a token, between the sampler's log-probs and the trainer's."""
    mine = response_stats(setup.policy, params, rollout, setup.config.temperature or 1.0).logprobs
    return jnp.max(jnp.abs(mine - rollout.logprobs) * response_mask(rollout))


@functools.partial(jax.jit, static_argnames=("setup",))
def _values(setup: PPOSetup, own_params, frozen, reference_params, experience: Experience, kl_coef):
    policy_params = join(frozen, own_params)
    rollout, mask = experience.rollout, response_mask(experience.rollout)
    temperature = setup.config.temperature or 1.0
    mine = response_stats(setup.policy, policy_params, rollout, temperature).logprobs
    ratio = jnp.max(jnp.abs(jnp.exp(mine - rollout.logprobs) - 1.0) * mask)
    kl = jnp.float32(0.0)
    for at in (*KL_TEMPERATURES, temperature):
        ours = response_stats(setup.policy, policy_params, rollout, at).logprobs
        theirs = response_stats(setup.reference, reference_params, rollout, at).logprobs
        kl = jnp.maximum(kl, jnp.max(jnp.sum(kl_penalty(ours, theirs, "abs") * mask, axis=1)))
        if setup.config.kl_estimator == "full":
            full = response_kl(setup, policy_params, reference_params, rollout, at)
            kl = jnp.maximum(kl, jnp.max(jnp.sum(jnp.abs(full) * mask, axis=1)))
    counts = totals(setup, experience)
    reference = reference_params if setup.loss_reads_reference else None

    def loss_fn(params, part):
        return policy_loss(setup, join(frozen, params), part, counts, kl_coef, reference_params=reference)

    (whole, _), whole_gradients = accumulate(loss_fn, own_params, experience, 1)
    rows = len(rollout.response_length)
    split = CHECKED_MICRO_BATCHES if rows % CHECKED_MICRO_BATCHES == 0 else rows
    (parts, _), part_gradients = accumulate(loss_fn, own_params, experience, split)
    largest = lambda tree: jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))  # noqa: E731
    difference = largest(jax.tree.map(jnp.subtract, whole_gradients, part_gradients))
    scale = jnp.maximum(largest(whole_gradients), 1e-8)
    loss_gap = jnp.maximum(jnp.abs(whole - parts) / jnp.maximum(jnp.abs(whole), 1e-2), difference / scale)
    return ratio, kl, loss_gap


def step_zero_checks(
    setup: PPOSetup, reference_params, policy_params, sampled: Rollout, experience: Experience, kl_coef, frozen=None
) -> tuple[Check, ...]:
    """The four checks as a tuple of `Check`s, to be run before the first update, when policy and reference are equal.

    `sampled` is the rollout as the sampler gave it; `experience` holds the old log-probs in use. With `frozen`
    policy_params are those that are trained.
    """
    measured = _values(setup, policy_params, frozen, reference_params, experience, kl_coef)
    ratio, kl, loss_gap = (float(x) for x in measured)
    gap = float(sampler_gap(setup, join(frozen, policy_params), sampled))
    tolerance = setup.config.sampler_tolerance
    rows = [
        ("ratio", ratio, tolerance, "largest |ratio - 1| before any update: above this, old log-probs are not the policy's"),
        ("reference KL", kl, 1e-5, "largest |KL| of a response against an equal reference at temperatures "
         f"{', '.join(map(str, KL_TEMPERATURES))} and the sampling one: above this, the two are not treated alike"),
        ("sampler gap", gap, tolerance, "largest difference of the sampler's and the trainer's log-probs, nats a token"),
        ("micro-batches", loss_gap, 1e-3 if setup.policy.config.compute_dtype == "float32" else 5e-2,
         "relative difference of loss and gradients between one micro-batch and several"),
    ]  # fmt: skip
    return tuple(Check(name, value, limit, bool(value <= limit), meaning) for name, value, limit, meaning in rows)


def act_on(checks: tuple[Check, ...], policy: str, stage: str) -> None:
    """Warns of each failed check, or raises UserError for the first when `policy` is "stop"."""
    for check in checks:
        if check.passed:
            continue
        text = (
            f"{stage}: check '{check.name}' is {check.value:.3g}, above its tolerance {check.tolerance:.3g} "
            f"({check.meaning})"
        )
        if policy == "stop":
            raise UserError(text + "; config.ppo.on_sampler_gap is 'stop'")
        logging.getLogger("jaxalign").warning(text)
