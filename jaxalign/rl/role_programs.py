"""The programs of single roles, for roles on meshes of their own: each runs one model over the packed rows of a rollout."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.role_meshes import moved, rows_moved
from jaxalign.parallel.traced import traced
from jaxalign.records import Experience, PackedParts
from jaxalign.rl.arguments import CriticArguments, RoleArguments, UpdateArguments
from jaxalign.rl.losses import totals, value_loss
from jaxalign.rl.metrics import UpdateMetrics
from jaxalign.rl.program_times import RunProgram, unrecorded
from jaxalign.rl.responses import logprobs_by_parts, response_values
from jaxalign.rl.state import PPOSetup, PPOState
from jaxalign.rl.update import (
    critic_update,
    iteration_metrics,
    minibatches,
    run_minibatches,
    with_counted_responses,
    with_critic,
    with_kl_coef,
)
from jaxalign.steps.metrics import GradientMetrics
from jaxalign.steps.packed import each_part
from jaxalign.steps.state import TrainState

CriticMetrics = tuple[dict[str, jax.Array], GradientMetrics]
"""The sums of the critic's loss and its gradient metrics, each [epochs * minibatches]."""


@MeshProgram
def logprobs_of(given: RoleArguments) -> jax.Array:
    """float32 [B, N]: log-probabilities of the response tokens. Entries beyond the end of a response are meaningless."""
    return logprobs_by_parts(given.model, given.params, given.rollout, given.temperature, given.parts)


@MeshProgram
def values_of(given: RoleArguments) -> jax.Array:
    """float32 [B, N]: values before each response token. Entries beyond the end of a response are meaningless."""
    return each_part(given.parts, lambda rows: response_values(given.model, given.params, given.rollout, None, rows))


@functools.partial(MeshProgram, donate_argnames=("policy",))
def policy_epochs(
    policy: TrainState, given: UpdateArguments, kl_coef, step
) -> tuple[TrainState, UpdateMetrics, jax.Array]:
    """(policy, metrics of each minibatch, which minibatches ran) after all epochs, without a separate critic. The policy is
    donated."""
    policy, _, metrics, ran = run_minibatches(policy, None, kl_coef, step, given)
    return policy, metrics, ran


@functools.partial(MeshProgram, donate_argnames=("critic",))
def critic_epochs(critic: TrainState, given: CriticArguments) -> tuple[TrainState, CriticMetrics]:
    """(critic, metrics of each minibatch) after all epochs. The critic is donated."""
    setup = given.setup

    def run(critic: TrainState, rows, packed: PackedParts):
        part = setup.critic.constrain_rows(jax.tree.map(lambda x: x[rows], given.batch))
        critic, sums, gradient = critic_update(setup, value_loss, critic, part, packed, totals(setup, part), given.frozen)
        return critic, (sums, gradient)

    def one(critic: TrainState, minibatch):
        rows, packed, ran = minibatch
        if setup.config.target_kl is None:
            return run(critic, rows, packed)
        run_once, (_, shapes) = traced(run, critic, rows, packed)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(ran > 0, run_once, lambda own, *_: (own, zeros), critic, rows, packed)

    return jax.lax.scan(one, critic, (given.order, given.packed, given.ran))


@functools.partial(jax.jit, static_argnames=("setup",))
def _joined_metrics(
    setup: PPOSetup, kl_coef, step, batch: Experience, order, metrics: UpdateMetrics, ran, critic: CriticMetrics
) -> tuple[jax.Array, jax.Array, UpdateMetrics]:
    """(step, KL coefficient, metrics) after an iteration."""
    sums, gradient = critic
    metrics = with_critic(UpdateMetrics(**{**vars(metrics), **sums}), gradient)
    means = iteration_metrics(setup, metrics, ran, with_counted_responses(batch, order))
    kl_coef, means = with_kl_coef(setup, kl_coef, batch, means)
    return step + 1, kl_coef, means


def update_apart(
    setup: PPOSetup, state: PPOState, batch: Experience, frozen: Sequence, reference_params=None,
    program: RunProgram = unrecorded,
) -> tuple[PPOState, UpdateMetrics]:
    """`update.ppo_update` with policy and critic on meshes of their own, which run at the same time.

    With `config.ppo.target_kl`, the critic waits for the policy, to train on the same minibatches.

    Args:
      setup: models, optimizers and options; with a critic apart.
      state: the state; policy and critic are donated.
      batch: the experience, on the policy's mesh.
      frozen: the base under the adapters on the mesh of the policy and on that of the critic; None each without adapters.
      reference_params: as in `UpdateArguments`.
      program: runs the jitted calls of policy and critic.
    """
    shardings = setup.policy.sharding, setup.critic.sharding
    (order, packed), (critic_order, critic_packed) = minibatches(setup, state, batch, shardings)
    valued = rows_moved(batch, setup.critic.sharding)
    given = UpdateArguments(
        setup=setup, batch=batch, order=order, packed=packed, frozen=frozen[0], reference_params=reference_params,
    )
    policy, metrics, ran = program(
        "policy update", "policy", lambda: policy_epochs(state.policy, given, state.kl_coef, state.step),
        watched=lambda result: result[1:],
    )
    known = jnp.ones(len(order)) if setup.config.target_kl is None else ran
    critic_given = CriticArguments(
        setup=setup, batch=valued, order=critic_order, packed=critic_packed, frozen=frozen[1],
        ran=jax.device_put(known, setup.critic.sharding.replicated),
    )
    critic, learnt = program(
        "critic update", "critic", lambda: critic_epochs(state.critic, critic_given),
        ("advantages",) if setup.config.target_kl is None else ("policy update",), lambda result: result[1],
    )
    learnt = moved(learnt, setup.policy.sharding)
    step, kl_coef, means = _joined_metrics(setup, state.kl_coef, state.step, batch, order, metrics, ran, learnt)
    return PPOState(step, policy, critic, kl_coef), means
