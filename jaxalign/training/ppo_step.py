"""The PPO update: epochs of freshly shuffled minibatches over one rollout buffer, in one jitted, donated call."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.kl import update_kl_coef
from jaxalign.algorithms.masked import aggregate, masked_mean, whiten
from jaxalign.algorithms.policy_losses import clipped_surrogate
from jaxalign.algorithms.value_losses import clipped_value_loss, explained_variance
from jaxalign.records import Experience
from jaxalign.training.experience import response_mask, response_stats, response_values
from jaxalign.training.microbatch import Aux, accumulate
from jaxalign.training.ppo_state import PPOSetup, PPOState
from jaxalign.training.state import apply_gradients


def policy_loss(setup: PPOSetup, params, batch: Experience, total):
    """(loss, Aux): the clipped surrogate, summed over the response tokens and divided by `total`, the tokens of the
    whole minibatch. batch.advantages are whitened already if they are to be."""
    config, mask = setup.config, response_mask(batch.rollout)
    stats = response_stats(setup.policy, params, batch.rollout, config.temperature or 1.0)
    loss, surrogate = clipped_surrogate(
        stats.logprobs, batch.rollout.logprobs, batch.advantages, config.clip, config.clip, mask
    )
    mean = lambda x: aggregate(x, mask, total=total)  # noqa: E731
    loss = mean(loss)
    sums = {
        "policy_loss": loss,
        "entropy": mean(stats.entropy),
        "ratio_mean": mean(surrogate.ratio),
        "clip_fraction": mean(surrogate.clipped.astype(jnp.float32)),
        "approx_kl": mean(surrogate.approx_kl),
    }
    gap = jnp.max(jnp.abs(stats.logprobs - batch.rollout.logprobs) * mask)
    return loss, Aux(sums, {"ratio_max": jnp.max(surrogate.ratio * mask), "sampler_gap": gap})


def value_loss(setup: PPOSetup, params, batch: Experience, total):
    """(value_coef * loss, Aux) of the critic, like `policy_loss`."""
    config, mask = setup.config, response_mask(batch.rollout)
    values = response_values(setup.critic, params, batch.rollout)
    loss, clipped = clipped_value_loss(values, batch.values, batch.returns, config.value_clip, mask)
    loss = aggregate(loss, mask, total=total)
    sums = {"value_loss": loss, "value_clip_fraction": aggregate(clipped.astype(jnp.float32), mask, total=total)}
    return config.value_coef * loss, Aux(sums)


def minibatch_update(setup: PPOSetup, policy, critic, batch: Experience):
    """One update of policy and critic: (policy, critic, metrics). Whitening is over the whole minibatch (Pitfall 7)."""
    config, mask = setup.config, response_mask(batch.rollout)
    total = jnp.sum(mask)
    if config.whiten_advantages:
        batch = dataclasses.replace(batch, advantages=whiten(batch.advantages, mask))
    (_, policy_aux), policy_gradients = accumulate(
        lambda params, part: policy_loss(setup, params, part, total), policy.params, batch, config.micro_batches
    )
    (_, value_aux), value_gradients = accumulate(
        lambda params, part: value_loss(setup, params, part, total), critic.params, batch, config.micro_batches
    )
    policy, policy_metrics = apply_gradients(policy, policy_gradients, setup.policy_optimizer)
    critic, critic_metrics = apply_gradients(critic, value_gradients, setup.critic_optimizer)
    metrics = {**policy_aux.sums, **policy_aux.maxima, **value_aux.sums, "grad_norm": policy_metrics["grad_norm"]}
    metrics |= {"critic_grad_norm": critic_metrics["grad_norm"]}
    metrics |= {"skipped": policy_metrics["skipped"] + critic_metrics["skipped"]}
    return policy, critic, metrics


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def ppo_update(setup: PPOSetup, state: PPOState, batch: Experience):
    """All epochs over one buffer of B rows: (state, metrics).

    Each epoch visits every row once in a fresh order, keyed by (run key, iteration, epoch). When `target_kl` is set and a
    minibatch's approx_kl exceeds it, the minibatches left in this iteration change nothing; metrics are means over
    the minibatches that ran.
    """
    config = setup.config
    B = batch.advantages.shape[0]
    key = jax.random.fold_in(jax.random.wrap_key_data(state.policy.key), state.step)
    order = jnp.stack([jax.random.permutation(jax.random.fold_in(key, e), B) for e in range(config.epochs)])
    order = order.reshape(config.epochs * config.minibatches, B // config.minibatches)

    def run(carry, rows):
        policy, critic, _ = carry
        part = jax.tree.map(lambda x: setup.policy.constrain(x[rows], ("batch",) + (None,) * (x.ndim - 1)), batch)
        policy, critic, metrics = minibatch_update(setup, policy, critic, part)
        stop = metrics["approx_kl"] > config.target_kl if config.target_kl is not None else jnp.bool_(False)
        return (policy, critic, stop), {**metrics, "ran": jnp.float32(1.0)}

    def one(carry, rows):
        if config.target_kl is None:
            return run(carry, rows)
        shapes = jax.eval_shape(run, carry, rows)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(carry[2], lambda c, _: (c, zeros), run, carry, rows)

    start = (state.policy, state.critic, jnp.bool_(False))
    (policy, critic, _), metrics = jax.lax.scan(one, start, order)
    ran = metrics.pop("ran")
    stopped = jnp.sum(ran) < len(order)
    # Only the first minibatch meets the very weights that sampled: there the gap is the numerics', later it is learning.
    largest = {"ratio_max": jnp.max(metrics.pop("ratio_max")), "sampler_gap": metrics.pop("sampler_gap")[0]}
    means = largest | {name: jnp.sum(values * ran) / jnp.sum(ran) for name, values in metrics.items()}
    means |= {"epochs_run": jnp.sum(ran) / config.minibatches, "stopped_early": stopped.astype(jnp.float32)}
    mask = response_mask(batch.rollout)
    means |= {"explained_variance": explained_variance(batch.values, batch.returns, mask), "kl_coef": state.kl_coef}
    kl = jnp.sum((batch.rollout.logprobs - batch.reference_logprobs) * mask, axis=1)
    measured = masked_mean(kl, (batch.rollout.prompt_length > 0).astype(jnp.float32))
    kl_coef = update_kl_coef(
        state.kl_coef, measured, config.kl_target, config.kl_horizon, B, config.kl_controller
    )
    return PPOState(state.step + 1, policy, critic, kl_coef), means
