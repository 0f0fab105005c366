"""The PPO update: epochs, minibatches, micro-batches, the KL stop and the KL controller all take effect."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.rl.losses import policy_loss, totals
from jaxalign.rl.update import minibatch_update, minibatches, ppo_update
from tests import tiny

pytestmark = pytest.mark.medium

SGD = optax.sgd(1.0)  # an update is the gradient


@pytest.fixture(scope="module")
def buffer():
    """One rollout on the host, with advantages that are not zero."""
    setup = tiny.setup()
    state = tiny.state(setup)
    experience, _ = tiny.experience(setup, state, tiny.roles(setup, 1), tiny.rollout(setup, state.policy.params))
    return tiny.to_host(experience)


def counts(state):
    """Every count of updates in a train state: its own and those of its optimizer."""
    found = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")
    return {int(state.step), *(int(value) for _, value in found)}


def test_pitfall_11_the_number_of_updates_is_epochs_times_minibatches(buffer):
    """Another system accepted `num_epochs` and never read it."""
    setup = tiny.setup(epochs=3, minibatches=4)
    state, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert counts(state.policy) == counts(state.critic) == {12}
    assert int(state.step) == 1
    assert float(metrics.epochs_run) == 3 and float(metrics.stopped_early) == 0


def once():
    """Return (setup, fresh state) of one update by the gradient, with all responses in one packed micro-batch."""
    setup = tiny.setup(epochs=1, minibatches=1, micro_batch_tokens=128)
    setup = dataclasses.replace(setup, policy_optimizer=SGD, critic_optimizer=SGD)
    return setup, tiny.state(setup)


def test_the_first_update_has_ratio_1_and_an_unclipped_loss_of_0(buffer):
    """With whitened advantages the loss is 0 before the first update, and nothing is clipped."""
    state, metrics = ppo_update(*once(), buffer)
    assert counts(state.policy) == counts(state.critic) == {1}
    assert float(metrics.epochs_run) == 1 and float(metrics.stopped_early) == 0
    assert float(metrics.ratio_mean) == pytest.approx(1, abs=1e-5)
    assert float(metrics.ratio_max) == pytest.approx(1, abs=1e-4)
    assert float(metrics.policy_loss) == pytest.approx(0, abs=1e-5)
    assert float(metrics.clip_fraction) == 0 and float(metrics.approx_kl) == pytest.approx(0, abs=1e-8)
    count = buffer.rollout.response_length
    inside = np.arange(8)[None] < count[:, None]
    # The critic has not moved either: its loss is half the squared error of its values, averaged over tokens.
    expected = 0.5 * np.mean((buffer.values - buffer.returns)[inside] ** 2)
    assert float(metrics.value_loss) == pytest.approx(expected, rel=1e-5)
    unexplained = np.var((buffer.returns - buffer.values)[inside]) / np.var(buffer.returns[inside])
    assert float(metrics.explained_variance) == pytest.approx(1 - unexplained, rel=1e-4)


def test_later_updates_have_other_ratios_and_are_clipped(buffer):
    setup = tiny.setup(epochs=3, minibatches=4)
    _, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert float(metrics.ratio_max) > 1.2 and float(metrics.clip_fraction) > 0


@pytest.mark.slow
def test_packed_micro_batches_change_nothing(buffer):
    """Responses have unequal lengths. tests/rl/test_values_in_update.py has several micro-batches."""
    setup, state = once()
    assert setup.config.micro_batch_tokens == 8 * buffer.rollout.tokens.shape[1]
    fn = jax.jit(minibatch_update, static_argnums=0)
    policy, critic, expected = fn(setup, state.policy, state.critic, buffer, state.kl_coef)  # each response in a separate row
    expected = tiny.to_host((policy.params, critic.params, expected))
    state, metrics = ppo_update(setup, state, buffer)
    found = dataclasses.replace(metrics, kl_coef=None, epochs_run=None, stopped_early=None)
    learnt = tiny.to_host((state.policy.params, state.critic.params, found))
    chex.assert_trees_all_close(learnt, expected, rtol=1e-4, atol=2e-6)


def test_the_kl_stop_skips_the_rest_of_the_iteration_and_its_metrics_are_means_over_the_updates_that_ran(buffer):
    """approx_kl is 0 at the first update, and above the target at the second and last one, in the middle of an epoch."""
    setup = tiny.setup(epochs=3, minibatches=4, target_kl=1e-6)
    (order, _), = minibatches(setup, tiny.state(setup), buffer, (setup.policy.sharding,))
    state, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert float(metrics.epochs_run) == 0.5 and float(metrics.stopped_early) == 1
    assert counts(state.policy) == counts(state.critic) == {2}
    fn, state, ran = jax.jit(minibatch_update, static_argnums=0), tiny.state(setup), []
    policy, critic = state.policy, state.critic
    for rows in np.asarray(order)[:2]:
        part = jax.tree.map(lambda x: x[rows], buffer)  # noqa: B023
        policy, critic, one = fn(setup, policy, critic, part, state.kl_coef)
        ran.append(one)
    for name in ("approx_kl", "policy_loss", "value_loss", "entropy", "grad_norm", "ratio_mean"):
        expected = np.mean([float(getattr(one, name)) for one in ran])
        assert float(getattr(metrics, name)) == pytest.approx(expected, rel=1e-4, abs=1e-7), name


def measured_kl(buffer):
    inside = np.arange(8)[None] < buffer.rollout.response_length[:, None]
    return np.where(inside, buffer.rollout.logprobs - buffer.reference_logprobs, 0).sum(1).mean()


@pytest.fixture(scope="module")
def adaptive(buffer):
    """PPO of two updates with an adaptive coefficient and a stop after the last update. The KL is a tenth above its target."""
    target = float(np.float32(measured_kl(buffer) / 1.1))
    return tiny.setup(kl_controller="adaptive", kl_target=target, kl_horizon=40, epochs=2, minibatches=1, target_kl=1e-6)


@pytest.mark.slow
def test_a_stop_after_the_last_update_does_not_count(buffer, adaptive):
    state, metrics = ppo_update(adaptive, tiny.state(adaptive), buffer)
    assert counts(state.policy) == {2} and float(metrics.approx_kl) > 1e-6
    assert float(metrics.epochs_run) == 2 and float(metrics.stopped_early) == 0


@pytest.mark.parametrize("error", [-0.2, 0.1])
def test_the_adaptive_controller_keeps_its_coefficient_in_the_state(buffer, adaptive, error):
    """coef * (1 + clip(kl / target - 1, +-.2) * 8 / horizon), by hand: far below the target, and a tenth above it."""
    assert measured_kl(buffer) > 0.01
    if error < 0:  # A KL of 0.
        buffer = dataclasses.replace(buffer, reference_logprobs=buffer.rollout.logprobs)
    state, metrics = ppo_update(adaptive, tiny.state(adaptive), buffer)
    assert float(metrics.kl_coef) == pytest.approx(0.05)
    assert float(state.kl_coef) == pytest.approx(0.05 * (1 + error * 8 / 40), rel=1e-5)
    again, _ = ppo_update(adaptive, state, buffer)
    assert float(again.kl_coef) == pytest.approx(0.05 * (1 + error * 8 / 40) ** 2, rel=1e-5)


def test_the_fixed_controller_keeps_the_coefficient(buffer):
    state, _ = ppo_update(*once(), buffer)
    assert float(state.kl_coef) == np.float32(0.05)


DECAY = 0.5
STILL = optax.chain(optax.trace(decay=DECAY), optax.scale(0.0))


def traced(buffer, step=0):
    """Return (the decayed sum of the gradients in order, the order of the rows), with frozen weights and one row per
    minibatch."""
    setup = tiny.setup(epochs=2, minibatches=8, whiten_advantages=False)
    setup = dataclasses.replace(setup, policy_optimizer=STILL, critic_optimizer=STILL)
    state = tiny.state(setup)
    state = dataclasses.replace(state, step=state.step + step)
    (order, _), = minibatches(setup, state, buffer, (setup.policy.sharding,))
    state, _ = ppo_update(setup, state, buffer)
    trace = optax.tree_utils.tree_get(state.policy.opt_state, "trace")["embedding"]
    return np.asarray(trace, np.float64), np.asarray(order).ravel()


@pytest.mark.slow
def test_each_epoch_visits_every_row_once_in_a_new_order(buffer):
    """A row's weight in the decayed sum of gradients shows its positions: .5^0 for the last, .5^15 for the first."""
    setup = tiny.setup(epochs=1, minibatches=8, whiten_advantages=False)

    @jax.jit
    def gradient(part):
        return jax.grad(lambda p: policy_loss(setup, p, part, totals(setup, part), 0.0)[0])(tiny.host_params())

    rows = [jax.tree.map(lambda x: x[row : row + 1], buffer) for row in range(8)]  # noqa: B023
    gradients = np.stack([np.asarray(gradient(part)["embedding"], np.float64).ravel() for part in rows], axis=1)

    trace, order = traced(buffer)
    weights, *_ = np.linalg.lstsq(gradients, trace.ravel(), rcond=None)
    expected = np.zeros(8)
    np.add.at(expected, order, DECAY ** np.arange(15.0, -1, -1))
    np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-6)
    epochs = order.reshape(2, 8)
    assert (np.sort(epochs) == np.arange(8)).all() and (epochs[0] != epochs[1]).any()
    again, other = traced(buffer), traced(buffer, step=1)
    assert (other[1] != order).any() and not np.array_equal(other[0], trace)
    np.testing.assert_array_equal(again[0], trace)
