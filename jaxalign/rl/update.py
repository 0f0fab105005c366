"""The RL update: epochs of shuffled, packed minibatches over one rollout, in one jitted call that donates the state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.kl import update_kl_coef
from jaxalign.algorithms.masked import masked_mean, masked_sum, whiten
from jaxalign.algorithms.value_losses import explained_variance
from jaxalign.models.adapters.lora import join, strip_frozen
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.parallel.rows import fetch
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.traced import traced
from jaxalign.records import Experience, PackedParts
from jaxalign.rl.arguments import UpdateArguments
from jaxalign.rl.losses import Totals, first_value_loss, joint_loss, policy_loss, totals, value_loss, with_values
from jaxalign.rl.metrics import UpdateMetrics
from jaxalign.rl.program_times import RunProgram, unrecorded
from jaxalign.rl.responses import experience_mask
from jaxalign.rl.state import PPOSetup, PPOState
from jaxalign.steps.metrics import GradientMetrics
from jaxalign.steps.packed import answer_parts, pack_groups
from jaxalign.steps.state import TrainState, gradient_step


def minibatch_update(
    setup: PPOSetup, policy, critic, batch: Experience, kl_coef, learn_policy=True, frozen=None, reference_params=None,
    packed: PackedParts | None = None,
) -> tuple[TrainState, TrainState | None, UpdateMetrics]:
    """One update of policy and critic on one minibatch. Advantages are whitened over the whole minibatch.

    Without a response token that counts, neither policy nor critic changes: the moments of the optimizer would move them.

    Args:
      setup: models, optimizers and options.
      policy, critic: their `TrainState`s; critic is None unless it is separate and updated in this program.
      batch: the experience of the minibatch.
      kl_coef: the weight of the KL penalty, if it is in the loss.
      learn_policy: bool scalar; if False, the policy does not change.
      frozen: the base that models with adapters share, or None.
      reference_params: the reference's joined parameters if `setup.loss_reads_reference`, else None.
      packed: the minibatch in micro-batches; None for one micro-batch in which each response has its own row.

    Returns:
      (policy, critic, metrics).
    """
    chex.assert_equal_shape([batch.advantages, batch.returns, batch.values, batch.reference_logprobs, batch.importance])
    chex.assert_shape(batch.weight, batch.advantages.shape[:1])
    config, mask = setup.config, experience_mask(batch)
    whole, first, sums, critic_gradient = totals(setup, batch), (), {}, None
    if setup.values_in_update:
        batch, packed = after(setup.policy.sharding, (batch, packed), (batch, whole))
        critic, sums, critic_gradient = critic_update(setup, first_value_loss, critic, batch, packed, whole, frozen)
        batch = with_values(setup, batch, sums.pop("values"))
        sums["explained_variance"] = explained_variance(batch.values, batch.returns, mask)
        first = critic.params, sums, critic_gradient
    if config.whiten_advantages:
        batch = dataclasses.replace(batch, advantages=whiten(batch.advantages, mask))
    loss_fn = joint_loss if setup.shares_trunk else policy_loss
    batch, packed = after(setup.policy.sharding, (batch, packed), (batch, whole, first))
    parts = answer_parts(batch, packed)
    learnt, aux, gradient = gradient_step(
        setup.policy, setup.policy_optimizer, policy,
        lambda params, part: loss_fn(
            setup, params, part[0], whole, kl_coef, reference_params=reference_params, rows=part[1]
        ), parts, frozen, whole.tokens > 0, first,
    )
    if config.critic_warmup:
        learnt = jax.tree.map(lambda new, old: jnp.where(learn_policy, new, old), learnt, policy)
    if setup.runs_critic and not setup.shares_trunk and critic is not None:
        batch, packed = after(setup.policy.sharding, (batch, packed), (learnt.params, aux, gradient))
        critic, sums, critic_gradient = critic_update(
            setup, value_loss, critic, batch, packed, whole, frozen, (aux, gradient)
        )
    metrics = UpdateMetrics(**aux.sums, **aux.maxima, **sums, **vars(gradient))
    return learnt, critic, metrics if critic_gradient is None else with_critic(metrics, critic_gradient)


def with_critic(metrics: UpdateMetrics, critic: GradientMetrics) -> UpdateMetrics:
    """Adds the gradient metrics of a separate critic."""
    skipped, overflowed = jax.tree.map(jnp.add, (metrics.skipped, metrics.overflowed), (critic.skipped, critic.overflowed))
    return dataclasses.replace(
        metrics,
        skipped=skipped,
        overflowed=overflowed,
        critic_grad_norm=critic.grad_norm,
        critic_loss_scale=critic.loss_scale,
    )


def critic_update(
    setup: PPOSetup, loss_fn, critic: TrainState, batch: Experience, packed: PackedParts | None, whole: Totals, frozen,
    first=(),
) -> tuple[TrainState, dict[str, jax.Array], GradientMetrics]:
    """(critic, sums that the loss reports, gradient metrics) after one update with `loss_fn`, which is `value_loss` or
    `first_value_loss`. first: see `gradient_step`."""
    parts = answer_parts(batch, packed)
    critic, aux, gradient = gradient_step(
        setup.critic, setup.critic_optimizer, critic,
        lambda params, part: loss_fn(setup, params, part[0], whole, rows=part[1]), parts, frozen, whole.tokens > 0, first,
    )
    return critic, dict(aux.sums), gradient


def ppo_update(
    setup: PPOSetup, state: PPOState, batch: Experience, frozen=None, reference_params=None, program: RunProgram = unrecorded
) -> tuple[PPOState, UpdateMetrics]:
    """Runs all epochs over one experience of B rows.

    Each epoch visits every row once, in a new order keyed by (run key, iteration, epoch). Once a minibatch's approx_kl exceeds
    `config.ppo.target_kl`, the remaining minibatches of the iteration are skipped.

    Args:
      setup: models, optimizers and options.
      state: the state; it is donated.
      batch: the experience of the iteration.
      frozen: the base that models with adapters share, or None.
      reference_params: the reference's joined parameters if `setup.loss_reads_reference`, else None.
      program: runs the jitted call.

    Returns:
      (state, metrics); most metrics are means over the minibatches that ran.
    """
    (order, packed), = minibatches(setup, state, batch, (setup.policy.sharding,))
    given = UpdateArguments(
        setup=setup, batch=batch, order=order, packed=packed, frozen=frozen,
        reference_params=strip_frozen(frozen, reference_params),
    )
    name = "policy and critic update" if setup.owns_critic else "policy update"
    return program(name, "policy", lambda: packed_update(state, given), watched=lambda result: result[1])


def minibatches(
    setup: PPOSetup, state: PPOState, batch: Experience, shardings: Sequence[Sharding]
) -> list[tuple[jax.Array, PackedParts]]:
    """(order, packed) of `UpdateArguments` on each of several meshes: the same rows in the same order on all of them."""
    config = setup.config
    here, weight, key, step = fetch((batch.rollout, batch.weight, state.policy.key, state.step))
    order = np.asarray(_orders(config.epochs, len(weight), key, step)).reshape(config.epochs * config.minibatches, -1)
    return [
        (jax.make_array_from_callback(order.shape, sharding.replicated, lambda window: order[window]),
         pack_groups(here, order, weight > 0, config.micro_batch_tokens, sharding))
        for sharding in shardings
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _orders(epochs: int, B: int, key, step) -> jax.Array:
    """int32 [epochs, B]: the order of the rows in each epoch."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
    return jnp.stack([jax.random.permutation(jax.random.fold_in(key, e), B) for e in range(epochs)])


@functools.partial(MeshProgram, donate_argnames=("state",))
def packed_update(state: PPOState, given: UpdateArguments) -> tuple[PPOState, UpdateMetrics]:
    """`ppo_update` on packed minibatches: (state, metrics). The state is donated."""
    policy, critic, metrics, ran = run_minibatches(state.policy, state.critic, state.kl_coef, state.step, given)
    batch = after(given.setup.policy.sharding, given.batch, (metrics, ran))
    means = iteration_metrics(given.setup, metrics, ran, with_counted_responses(batch, given.order))
    batch = after(given.setup.policy.sharding, batch, means)
    kl_coef, means = with_kl_coef(given.setup, state.kl_coef, batch, means)
    return PPOState(state.step + 1, policy, critic, kl_coef), means


def run_minibatches(
    policy: TrainState, critic: TrainState | None, kl_coef, step, given: UpdateArguments
) -> tuple[TrainState, TrainState | None, UpdateMetrics, jax.Array]:
    """Runs all minibatches of an iteration.

    Args:
      policy, critic: as in `minibatch_update`.
      kl_coef, step: as in `PPOState`.
      given: the experience and its minibatches.

    Returns:
      (policy, critic, metrics of each minibatch, float32 [epochs * minibatches]: 1 for the minibatches that ran).
    """
    setup, config, batch, frozen = given.setup, given.setup.config, given.batch, given.frozen
    reference_params = None if given.reference_params is None else join(frozen, given.reference_params)
    chex.assert_shape(given.order, (config.epochs * config.minibatches, None))
    learn_policy = step >= config.critic_warmup

    def run(carry, minibatch):
        policy, critic, _ = carry
        rows, packed = minibatch
        part = setup.policy.constrain_rows(jax.tree.map(lambda x: x[rows], batch))
        policy, critic, metrics = minibatch_update(
            setup, policy, critic, part, kl_coef, learn_policy, frozen, reference_params, packed
        )
        stop = metrics.approx_kl > config.target_kl if config.target_kl is not None else jnp.bool_(False)
        return (policy, critic, stop), (metrics, jnp.float32(1.0))

    def one(carry, minibatch):
        if config.target_kl is None:
            return run(carry, minibatch)
        run_once, (_, shapes) = traced(run, carry, minibatch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(carry[2], lambda c, _: (c, zeros), run_once, carry, minibatch)

    start = (policy, critic, jnp.bool_(False))
    (policy, critic, _), (metrics, ran) = jax.lax.scan(one, start, (given.order, given.packed))
    return policy, critic, metrics, ran


def with_kl_coef(setup: PPOSetup, kl_coef, batch: Experience, means: UpdateMetrics) -> tuple[jax.Array, UpdateMetrics]:
    """(the KL coefficient of the next iteration, the metrics with this one's and with the explained variance)."""
    config, mask = setup.config, experience_mask(batch)
    means = dataclasses.replace(means, kl_coef=kl_coef)
    if setup.runs_critic:
        means = dataclasses.replace(means, explained_variance=explained_variance(batch.values, batch.returns, mask))
    # The controller always measures the KL with k1, which is unbiased, whatever estimator the penalty uses.
    kl = masked_sum(batch.rollout.logprobs - batch.reference_logprobs, mask, axis=1)
    measured = masked_mean(kl, batch.weight)
    kl_coef = update_kl_coef(
        kl_coef, measured, config.kl_target, config.kl_horizon, jnp.sum(batch.weight), config.kl_controller
    )
    return kl_coef, means


def with_counted_responses(batch: Experience, order) -> jax.Array:
    """float32 [minibatches]: 1 for the minibatches, whose rows are `order`, with a response token that counts."""
    return jnp.any(jnp.any(experience_mask(batch) > 0, axis=1)[order], axis=1).astype(jnp.float32)


def iteration_metrics(setup: PPOSetup, metrics: UpdateMetrics, ran, counted) -> UpdateMetrics:
    """An iteration's metrics from those of its minibatches, each [minibatches].

    Args:
      setup: models, optimizers and options.
      metrics: the metrics of each minibatch.
      ran: 1 for the minibatches that ran.
      counted: `with_counted_responses`; the other minibatches have no loss and no statistics of responses, which are NaN if
        there is no other.
    """
    stopped, averaged = jnp.sum(ran) < len(ran), ran * counted
    count = jnp.sum(averaged)
    means = jax.tree.map(lambda values: jnp.sum(values * averaged) / count, metrics)
    gradients = {
        name: jnp.where(count > 0, values, 0)
        for name in ("grad_norm", "critic_grad_norm") if (values := getattr(means, name)) is not None
    }
    of_updates = {
        name: jnp.sum(values * ran) / jnp.sum(ran)
        for name in ("skipped", "overflowed", "loss_scale", "critic_loss_scale")
        if (values := getattr(metrics, name)) is not None
    }
    return dataclasses.replace(
        means,
        **gradients,
        **of_updates,
        ratio_max=jnp.where(count > 0, jnp.max(metrics.ratio_max), jnp.nan),
        # Only the first minibatch uses the weights of the sampler: its gap is numerical, while later gaps include learning.
        sampler_gap=metrics.sampler_gap[0],
        epochs_run=jnp.sum(ran) / setup.config.minibatches,
        stopped_early=stopped.astype(jnp.float32),
    )
