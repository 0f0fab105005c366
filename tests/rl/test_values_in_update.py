"""With one update per rollout the critic's values come from its own training pass, with equal results."""

from __future__ import annotations

import dataclasses

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "keep"),
    [(None, {"whiten_advantages": False, "micro_batch_tokens": 16}, False), ((2, 2, 2), {}, False), ((1, 4, 1), {}, True),
     ((8, 1, 1), REINFORCE, False)],
)
def test_the_update_equals_one_with_values_computed_before(mesh, changes, keep):
    """Values are computed before on one device, and in the update on the mesh."""
    alone, before = setups(**changes)
    state = tiny.state(before)
    experience, _ = tiny.experience(before, state, tiny.roles(before, 1), tiny.rollout(before, state.policy.params))
    sampled = tiny.to_host(experience.rollout)
    assert np.abs(np.asarray(experience.values)).max() > 0.01
    policy, critic, expected = jax.jit(minibatch_update, static_argnums=0, compiler_options=tiny.COMPILE_FAST)(
        before, state.policy, state.critic, experience, state.kl_coef
    )
    inside = np.arange(8)[None] < np.asarray(experience.rollout.response_length)[:, None]
    explained = explained_variance(experience.values, experience.returns, inside)
    expected = dataclasses.replace(expected, explained_variance=explained)
    expected = tiny.to_host((policy.params, critic.params, expected))

    alone = alone if mesh is None else setups(mesh=mesh, **changes)[0]
    if keep:  # The policy's weights are gathered after the critic's update.
        sharding = dataclasses.replace(alone.policy.sharding, keep_gathered=True)
        alone = dataclasses.replace(alone, policy=alone.policy.on(sharding), critic=alone.critic.on(sharding))
    state = tiny.state(alone)
    experience, _ = tiny.experience(alone, state, tiny.roles(alone, 1), tiny.rows(alone.policy, sampled))
    assert not np.asarray(experience.values).any()
    state, metrics = ppo_update(alone, state, experience)
    found = dataclasses.replace(metrics, kl_coef=None, epochs_run=None, stopped_early=None)
    chex.assert_trees_all_close(tiny.to_host((state.policy.params, state.critic.params, found)), expected, rtol=1e-3, atol=5e-6)


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
