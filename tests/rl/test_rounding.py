"""Rounding errors and overflow of log-ratios must not become updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.rl.experience import make_experience
from jaxalign.rl.losses import policy_loss, totals
from tests import tiny


def _made(setup, scores, reference_seed=0):
    """Return (rollout, experience) of these scores; with reference_seed 0 the policy is its own reference."""
    state, frozen = tiny.state(setup), tiny.roles(setup, reference_seed=reference_seed)
    rollout = tiny.rollout(setup, state.policy.params)
    made, _ = make_experience(setup, False, frozen.reference, state.policy.params, None, state.kl_coef, rollout, scores)
    return state, rollout, made


@pytest.mark.medium
@pytest.mark.parametrize("advantages", ["grpo", "rloo"])
def test_equal_scores_give_no_advantage_although_the_kl_has_rounding_errors(advantages):
    setup = tiny.setup(advantages=advantages, group_size=4, missing_eos="none")
    _, _, made = _made(setup, jnp.full(8, 0.3))
    assert np.ptp(np.asarray(made.rewards).sum(axis=1)) > 0  # The errors are there.
    assert not np.asarray(made.advantages).any()
    _, _, moved = _made(setup, jnp.full(8, 0.3), reference_seed=1)
    assert np.asarray(moved.advantages).any()  # A KL that differs still counts.
    _, _, scored = _made(setup, jnp.array([0.3, 0.3, 0.3, 0.3 + 1e-6, 0.3, 0.3, 0.3, 0.3]))
    assert np.asarray(scored.advantages)[:4].any() and not np.asarray(scored.advantages)[4:].any()


def loss_of(params, setup, experience):
    return policy_loss(setup, params, experience, totals(setup, experience), 0.1)[0]


@pytest.mark.slow
def test_limited_log_ratios_keep_loss_and_gradient_finite():
    for limit, finite in ((None, False), (10.0, True)):
        setup = tiny.setup(
            advantages="grpo", group_size=4, kl_in="loss", kl_estimator="k3", log_ratio_limit=limit, missing_eos="none"
        )
        state, _, made = _made(setup, jnp.arange(8.0))
        far = dataclasses.replace(made, reference_logprobs=made.reference_logprobs + 120)
        loss, gradient = jax.jit(jax.value_and_grad(loss_of), static_argnums=1)(state.policy.params, setup, far)
        assert bool(np.isfinite(loss)) == finite
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)) == finite


@pytest.mark.medium
def test_a_limit_that_is_not_reached_changes_nothing():
    losses = []
    for limit in (None, 10.0):
        setup = tiny.setup(advantages="grpo", group_size=4, kl_in="loss", kl_estimator="k3", log_ratio_limit=limit)
        state, _, made = _made(setup, jnp.arange(8.0), reference_seed=1)
        losses.append(jax.jit(loss_of, static_argnums=1)(state.policy.params, setup, made))
    assert losses[0] == losses[1]
