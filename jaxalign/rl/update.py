"""The RL update: epochs of freshly shuffled minibatches over one rollout buffer, packed, in one jitted, donated call."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.kl import kl_loss, update_kl_coef
from jaxalign.algorithms.masked import aggregate, aggregate_total, masked_mean, masked_sum, whiten
from jaxalign.algorithms.value_losses import clipped_value_loss, explained_variance, huber_value_loss
from jaxalign.models.adapters.lora import apart, join
from jaxalign.parallel.ordered import after
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerRows, Experience, PackedParts
from jaxalign.rl.estimators import AdvantageInputs, estimate
from jaxalign.rl.experience import (
    experience_mask,
    response_hidden,
    response_kl,
    response_stats,
    response_values,
)
from jaxalign.rl.policy_losses import surrogate as surrogate_of
from jaxalign.rl.state import PPOSetup, PPOState
from jaxalign.training.microbatch import Aux, Parts
from jaxalign.training.packed import alone, pack_groups, take_part
from jaxalign.training.state import gradient_step


class Totals(NamedTuple):
    """Counts of the whole minibatch, which parts of it are divided by: tokens, and what the policy's loss is divided by."""

    tokens: jax.Array
    policy: jax.Array


def totals(setup: PPOSetup, batch: Experience) -> Totals:
    mask = experience_mask(batch)
    return Totals(jnp.sum(mask), aggregate_total(mask, setup.config.aggregation, setup.config.max_new_tokens))


def policy_loss(
    setup: PPOSetup, params, batch: Experience, whole: Totals, kl_coef, hidden=None, reference_params=None,
    rows: AnswerRows | None = None,
):  # fmt: skip
    """(loss, Aux) of the response tokens that count, divided by the counts of the whole minibatch.

    batch.advantages are whitened already if they are to be; kl_coef is read where the KL is in the loss; rows: where the
    responses that count stand, None: each in a row of its own; hidden is the trunk's, where it is known; reference_params
    where `setup.loss_reads_reference`.
    """
    config, mask, old = setup.config, experience_mask(batch), batch.rollout.logprobs
    temperature = config.temperature or 1.0
    rows = alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.policy, params, rows) if hidden is None else hidden
    stats = response_stats(setup.policy, params, batch.rollout, temperature, hidden, rows)
    per_token, surrogate = surrogate_of(config, stats.logprobs, old, batch.advantages, mask)
    if config.sampler_correction != "none":
        per_token = jnp.where(mask > 0, batch.importance, 0) * per_token
    if setup.loss_reads_reference:
        if reference_params is None:
            raise ValueError("kl_estimator 'full' in the loss needs the parameters of the reference")
        kl = response_kl(setup, params, reference_params, batch.rollout, temperature, hidden, rows)
        per_token = per_token + kl_coef * jnp.where(mask > 0, kl, 0)
    elif config.kl_in == "loss":
        per_token = per_token + kl_coef * kl_loss(stats.logprobs, batch.reference_logprobs, config.kl_estimator, mask)
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * jnp.where(mask > 0, stats.entropy, 0)
    loss = aggregate(per_token, mask, config.aggregation, whole.policy)
    mean = lambda x: aggregate(x, mask, total=whole.tokens)  # noqa: E731
    sums = {
        "policy_loss": loss,
        "entropy": mean(stats.entropy),
        "ratio_mean": mean(surrogate.ratio),
        "clip_fraction": mean(surrogate.clipped.astype(jnp.float32)),
        "approx_kl": mean(surrogate.approx_kl),
    }
    largest = lambda x: jnp.max(jnp.where(mask > 0, x, 0))  # noqa: E731
    return loss, Aux(sums, {"ratio_max": largest(surrogate.ratio), "sampler_gap": largest(jnp.abs(stats.logprobs - old))})


def value_loss(setup: PPOSetup, params, batch: Experience, whole: Totals, hidden=None, rows: AnswerRows | None = None):
    """(value_coef * loss, Aux) of the critic, like `policy_loss`."""
    config, mask = setup.config, experience_mask(batch)
    values = response_values(setup.critic, params, batch.rollout, hidden, rows)
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
    """`value_loss` where `setup.values_in_update`: these parameters' own values are also the old ones, which returns are made
    of. They are in `Aux.sums` as "values" [B, N]."""
    mask, rows = experience_mask(batch), alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.critic, params, rows)
    values = jax.lax.stop_gradient(response_values(setup.critic, params, batch.rollout, hidden, rows))
    valued = _valued(setup, batch, jnp.where(mask > 0, values, 0))
    loss, aux = value_loss(setup, params, valued, whole, hidden, rows)
    return loss, Aux({**aux.sums, "values": valued.values}, aux.maxima)


def _valued(setup: PPOSetup, batch: Experience, values) -> Experience:
    """With these values, and advantages and returns of them."""
    mask, none = experience_mask(batch) > 0, jnp.zeros_like(values)
    inputs = AdvantageInputs(batch.rewards, values, none, mask, batch.weight > 0, None, setup.config)
    advantages, returns = estimate(inputs)
    return dataclasses.replace(batch, values=values, advantages=advantages, returns=returns)


def joint_loss(
    setup: PPOSetup, params, batch: Experience, whole: Totals, kl_coef, reference_params=None, rows: AnswerRows | None = None
):
    """(policy loss + value_coef * value loss, Aux) of one trunk with both heads."""
    rows = alone(batch.rollout) if rows is None else rows
    hidden = response_hidden(setup.policy, params, rows)
    loss, policy = policy_loss(setup, params, batch, whole, kl_coef, hidden, reference_params, rows)
    value, critic = value_loss(setup, params, batch, whole, hidden, rows)
    return loss + value, Aux({**policy.sums, **critic.sums}, policy.maxima)


def minibatch_update(
    setup: PPOSetup, policy, critic, batch: Experience, kl_coef, learn_policy=True, frozen=None, reference_params=None,
    packed: PackedParts | None = None,
):  # fmt: skip
    """One update of policy and critic: (policy, critic, metrics). Whitening is over the whole minibatch (Pitfall 7).

    learn_policy: a bool; where False the policy stays as it is. frozen: of models with adapters, the base of both.
    reference_params: where `setup.loss_reads_reference`. packed: the batch's rows in micro-batches, None: all at once, each in
    a row of its own.
    """
    config, mask = setup.config, experience_mask(batch)
    whole, of_critic, first = totals(setup, batch), {}, ()
    if setup.values_in_update:
        batch, packed = after(setup.policy.sharding, (batch, packed), (batch, whole))
        critic, of_critic = _critic_update(setup, first_value_loss, critic, batch, packed, whole, frozen)
        batch, first = _valued(setup, batch, of_critic.pop("values")), (critic.params, of_critic)
        of_critic["explained_variance"] = explained_variance(batch.values, batch.returns, mask)
    if config.whiten_advantages:
        batch = dataclasses.replace(batch, advantages=whiten(batch.advantages, mask))
    loss_fn = joint_loss if setup.shares_trunk else policy_loss
    batch, packed = after(setup.policy.sharding, (batch, packed), (batch, whole, first))
    parts = experience_parts(batch, packed)
    learnt, aux, updated = gradient_step(
        setup.policy, setup.policy_optimizer, policy,
        lambda params, part: loss_fn(
            setup, join(frozen, params), part[0], whole, kl_coef, reference_params=reference_params, rows=part[1]
        ), parts,
    )  # fmt: skip
    if config.critic_warmup:
        learnt = jax.tree.map(lambda new, old: jnp.where(learn_policy, new, old), learnt, policy)
    metrics = {**aux.sums, **aux.maxima, **updated}
    if setup.runs_critic and not setup.shares_trunk:
        batch, packed = after(setup.policy.sharding, (batch, packed), (learnt.params, metrics))
        critic, of_critic = _critic_update(setup, value_loss, critic, batch, packed, whole, frozen)
    both = {name: metrics[name] + of_critic.pop(name) for name in ("skipped", "overflowed") if name in of_critic}
    return learnt, critic, metrics | of_critic | both


def _critic_update(setup: PPOSetup, loss_fn, critic, batch: Experience, packed: PackedParts | None, whole: Totals, frozen):
    """(critic, metrics) of one update by `value_loss` or `first_value_loss`."""
    parts = experience_parts(batch, packed)
    critic, aux, updated = gradient_step(
        setup.critic, setup.critic_optimizer, critic,
        lambda params, part: loss_fn(setup, join(frozen, params), part[0], whole, rows=part[1]), parts,
    )  # fmt: skip
    both = ("skipped", "overflowed")
    return critic, {**aux.sums, **{name if name in both else f"critic_{name}": value for name, value in updated.items()}}


def experience_parts(batch: Experience, packed: PackedParts | None) -> Parts:
    """The micro-batches of a minibatch, each (Experience, AnswerRows): all its rows, of which those of the part count."""
    if packed is None:
        return Parts(lambda _: (batch, alone(batch.rollout)), 1)

    def of(i):
        rows, inside = take_part(packed, i)
        return dataclasses.replace(batch, weight=jnp.where(inside, batch.weight, 0.0)), rows

    return Parts(of, packed.count)


def ppo_update(setup: PPOSetup, state: PPOState, batch: Experience, frozen=None, reference_params=None):
    """All epochs over one buffer of B rows: (state, metrics); the state is donated. frozen: of models with adapters, the base
    of both; reference_params: where `setup.loss_reads_reference`.

    Each epoch visits every row once in a fresh order, keyed by (run key, iteration, epoch). When `target_kl` is set and a
    minibatch's approx_kl exceeds it, the minibatches left in this iteration change nothing; metrics are means over
    the minibatches that ran.
    """
    config, sharding = setup.config, setup.policy.sharding
    here, weight, key, step = fetch((batch.rollout, batch.weight, state.policy.key, state.step))
    order = np.asarray(_orders(config.epochs, len(weight), key, step)).reshape(config.epochs * config.minibatches, -1)
    packed = pack_groups(here, order, weight > 0, config.micro_batch_tokens, sharding)
    if sharding is not None:
        order = jax.make_array_from_callback(order.shape, sharding.replicated, lambda window: order[window])
    return packed_update(setup, state, batch, order, packed, frozen, apart(frozen, reference_params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _orders(epochs: int, B: int, key, step) -> jax.Array:
    """int32 [epochs, B]: the order of the rows in each epoch."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
    return jnp.stack([jax.random.permutation(jax.random.fold_in(key, e), B) for e in range(epochs)])


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def packed_update(
    setup: PPOSetup, state: PPOState, batch: Experience, order, packed: PackedParts, frozen=None, reference_params=None
):
    """`ppo_update` by minibatches whose rows are order int32 [epochs * minibatches, ...] and stand as `packed` says.
    reference_params: without `frozen`."""
    config = setup.config
    if reference_params is not None:
        reference_params = join(frozen, reference_params)
    learn_policy = state.step >= config.critic_warmup

    def run(carry, minibatch):
        policy, critic, _ = carry
        rows, packed = minibatch
        part = setup.policy.constrain_rows(jax.tree.map(lambda x: x[rows], batch))
        policy, critic, metrics = minibatch_update(
            setup, policy, critic, part, state.kl_coef, learn_policy, frozen, reference_params, packed
        )
        stop = metrics["approx_kl"] > config.target_kl if config.target_kl is not None else jnp.bool_(False)
        return (policy, critic, stop), {**metrics, "ran": jnp.float32(1.0)}

    def one(carry, minibatch):
        if config.target_kl is None:
            return run(carry, minibatch)
        shapes = jax.eval_shape(run, carry, minibatch)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(carry[2], lambda c, _: (c, zeros), run, carry, minibatch)

    start = (state.policy, state.critic, jnp.bool_(False))
    (policy, critic, _), metrics = jax.lax.scan(one, start, (order, packed))
    ran = metrics.pop("ran")
    stopped = jnp.sum(ran) < len(order)
    # Only the first minibatch meets the very weights that sampled: there the gap is the numerics', later it is learning.
    largest = {"ratio_max": jnp.max(metrics.pop("ratio_max")), "sampler_gap": metrics.pop("sampler_gap")[0]}
    means = largest | {name: jnp.sum(values * ran) / jnp.sum(ran) for name, values in metrics.items()}
    means |= {"epochs_run": jnp.sum(ran) / config.minibatches, "stopped_early": stopped.astype(jnp.float32)}
    batch = after(setup.policy.sharding, batch, means)
    mask = experience_mask(batch)
    means |= {"kl_coef": state.kl_coef}
    if setup.runs_critic:
        means |= {"explained_variance": explained_variance(batch.values, batch.returns, mask)}
    # Whatever the penalty is, the controller steers by k1, the KL itself in expectation.
    kl = masked_sum(batch.rollout.logprobs - batch.reference_logprobs, mask, axis=1)
    measured = masked_mean(kl, batch.weight)
    kl_coef = update_kl_coef(
        state.kl_coef, measured, config.kl_target, config.kl_horizon, jnp.sum(batch.weight), config.kl_controller
    )
    return PPOState(state.step + 1, policy, critic, kl_coef), means
