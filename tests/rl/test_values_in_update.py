"""With one update per rollout the critic's values come from its own training pass, with equal results."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.algorithms.value_losses import explained_variance
from jaxalign.rl.state import values_in_update
from jaxalign.rl.update import minibatch_update, ppo_update
from tests import tiny

SGD = optax.sgd(1.0)  # an update is the gradient
REINFORCE = {"advantages": "reinforce", "value_loss": "huber", "policy_loss": "plain"}


def setups(**changes):
    """Return two setups that differ only in the source of values: the update, or the caller."""
    made = [tiny.setup(epochs=epochs, minibatches=1, **changes) for epochs in (1, 2)]
    return [dataclasses.replace(setup, policy_optimizer=SGD, critic_optimizer=SGD) for setup in made]


def rollout_of(setup):
    """Return (experience on the host, fresh state) of a rollout on one device."""
    state = tiny.state(setup)
    experience, _ = tiny.experience(setup, state, tiny.roles(setup, 1), tiny.rollout(setup, state.policy.params))
    return tiny.to_host(experience), state


@functools.cache
def expected(changes):
    """The learnt weights and the metrics of an update whose values were computed before."""
    _, before = setups(**dict(changes))
    experience, state = rollout_of(before)
    assert np.abs(experience.values).max() > 0.01
    policy, critic, found = jax.jit(minibatch_update, static_argnums=0, compiler_options=tiny.COMPILE_FAST)(
        before, state.policy, state.critic, experience, state.kl_coef
    )
    inside = np.arange(8)[None] < experience.rollout.response_length[:, None]
    explained = explained_variance(experience.values, experience.returns, inside)
    return tiny.to_host((policy.params, critic.params, dataclasses.replace(found, explained_variance=explained)))


@functools.cache
def without_values(changes):
    """The experience of an update that computes the values."""
    found, _ = rollout_of(setups(**dict(changes))[0])
    assert not found.values.any()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "keep"),
    [(None, REINFORCE | {"whiten_advantages": False, "micro_batch_tokens": 16}, False), ((2, 2, 2), {}, False),
     ((1, 4, 1), {}, True)],
)
def test_the_update_equals_one_with_values_computed_before(mesh, changes, keep):
    """Values are computed before on one device, and in the update on the mesh."""
    alone, _ = setups(mesh=mesh, **changes)
    if keep:  # The policy's weights are gathered after the critic's update.
        sharding = dataclasses.replace(alone.policy.sharding, keep_gathered=True)
        alone = dataclasses.replace(alone, policy=alone.policy.on(sharding), critic=alone.critic.on(sharding))
    changes = tuple(changes.items())
    state, metrics = ppo_update(alone, tiny.state(alone), tiny.rows(alone.policy, without_values(changes)))
    found = dataclasses.replace(metrics, kl_coef=None, epochs_run=None, stopped_early=None)
    learnt = tiny.to_host((state.policy.params, state.critic.params, found))
    chex.assert_trees_all_close(learnt, expected(changes), rtol=1e-3, atol=5e-6)


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 2}, {"minibatches": 2}, {"critic": "shared"}, {"advantages": "vtrace"},
     {"advantages": "grpo", "group_size": 2}],
)
def test_otherwise_values_are_computed_before_the_update(changes):
    config = tiny.setup().config
    once = dataclasses.replace(config, epochs=1, minibatches=1)
    assert values_in_update(once) and not values_in_update(config)
    assert not values_in_update(dataclasses.replace(once, **changes))
