"""The PPO update: epochs, minibatches, micro-batches, the KL stop and the KL controller all take effect."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.rl.losses import policy_loss, totals
from jaxalign.rl.state import init_ppo_state
from jaxalign.rl.update import minibatch_update, ppo_update
from tests import tiny

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


@pytest.mark.variants(1)
@pytest.mark.parametrize(("epochs", "minibatches"), [(3, 4), (1, 1), (2, 1)])
def test_pitfall_11_the_number_of_updates_is_epochs_times_minibatches(buffer, epochs, minibatches):
    """Another system accepted `num_epochs` and never read it."""
    setup = tiny.setup(epochs=epochs, minibatches=minibatches)
    state, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert counts(state.policy) == counts(state.critic) == {epochs * minibatches}
    assert int(state.step) == 1
    assert float(metrics.epochs_run) == epochs and float(metrics.stopped_early) == 0


def test_the_first_update_has_ratio_1_and_an_unclipped_loss_of_0(buffer):
    """With whitened advantages the loss is 0 before the first update, and nothing is clipped."""
    setup = tiny.setup(epochs=1, minibatches=1)
    _, metrics = ppo_update(setup, tiny.state(setup), buffer)
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
def test_packed_micro_batches_of_any_size_change_nothing(buffer):
    """Responses have unequal lengths: means of the means of parts would differ, and so would statistics of the parts."""
    T = buffer.rollout.tokens.shape[1]

    def fresh(micro_batch_tokens):
        setup = tiny.setup(epochs=1, minibatches=1, micro_batch_tokens=micro_batch_tokens)
        setup = dataclasses.replace(setup, policy_optimizer=SGD, critic_optimizer=SGD)
        policy, critic = tiny.place(setup.policy, tiny.host_params()), tiny.host_params("scalar", seed=3)
        return setup, init_ppo_state(setup, policy, tiny.place(setup.critic, critic), jax.random.key(0))

    setup, state = fresh(0)
    fn = jax.jit(minibatch_update, static_argnums=0)
    policy, critic, expected = fn(setup, state.policy, state.critic, buffer, state.kl_coef)  # each response in a separate row
    expected = tiny.to_host((policy.params, critic.params, expected))
    for tokens in (T, 8 * T):
        state, metrics = ppo_update(*fresh(tokens), buffer)
        found = dataclasses.replace(metrics, kl_coef=None, epochs_run=None, stopped_early=None)
        learnt = tiny.to_host((state.policy.params, state.critic.params, found))
        chex.assert_trees_all_close(learnt, expected, rtol=1e-4, atol=2e-6)


def test_the_kl_stop_skips_the_rest_of_the_iteration(buffer):
    setup = tiny.setup(epochs=4, minibatches=2, target_kl=1e-3)
    state, metrics = ppo_update(setup, tiny.state(setup), buffer)
    ran = round(float(metrics.epochs_run) * 2)
    assert 1 < ran < 8 and float(metrics.stopped_early) == 1
    assert counts(state.policy) == counts(state.critic) == {ran}


@pytest.mark.slow
def test_the_metrics_of_a_stopped_iteration_are_means_over_its_updates(buffer):
    """approx_kl is 0 at the first update, and above the target at the second and last one."""
    setup = tiny.setup(epochs=4, minibatches=1, target_kl=1e-6)
    _, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert float(metrics.epochs_run) == 2
    two = tiny.setup(epochs=2, minibatches=1)
    _, expected = ppo_update(two, tiny.state(two), buffer)
    for name in ("approx_kl", "policy_loss", "value_loss", "entropy", "grad_norm", "ratio_mean"):
        assert float(getattr(metrics, name)) == pytest.approx(float(getattr(expected, name)), rel=1e-5), name


@pytest.mark.slow
def test_a_stop_after_the_last_update_does_not_count(buffer):
    setup = tiny.setup(epochs=2, minibatches=1, target_kl=1e-6)
    _, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert float(metrics.epochs_run) == 2 and float(metrics.stopped_early) == 0


def measured_kl(buffer):
    inside = np.arange(8)[None] < buffer.rollout.response_length[:, None]
    return np.where(inside, buffer.rollout.logprobs - buffer.reference_logprobs, 0).sum(1).mean()


@pytest.mark.parametrize(("target", "error"), [(1000.0, -0.2), (None, 0.1)])
def test_the_adaptive_controller_keeps_its_coefficient_in_the_state(buffer, target, error):
    """coef * (1 + clip(kl / target - 1, +-.2) * 8 / horizon), by hand: far below the target, and a tenth above it."""
    kl = measured_kl(buffer)
    assert kl > 0.01
    target = float(np.float32(kl / 1.1)) if target is None else target
    setup = tiny.setup(kl_controller="adaptive", kl_target=target, kl_horizon=40, epochs=1, minibatches=1)
    state, metrics = ppo_update(setup, tiny.state(setup), buffer)
    assert float(metrics.kl_coef) == pytest.approx(0.05)
    assert float(state.kl_coef) == pytest.approx(0.05 * (1 + error * 8 / 40), rel=1e-5)
    again, _ = ppo_update(setup, state, buffer)
    assert float(again.kl_coef) == pytest.approx(0.05 * (1 + error * 8 / 40) ** 2, rel=1e-5)


def test_the_fixed_controller_keeps_the_coefficient(buffer):
    setup = tiny.setup(epochs=1, minibatches=1)
    state, _ = ppo_update(setup, tiny.state(setup), buffer)
    assert float(state.kl_coef) == np.float32(0.05)


DECAY = 0.5
STILL = optax.chain(optax.trace(decay=DECAY), optax.scale(0.0))


def traced(buffer, epochs, step=0):
    """The decayed sum of the gradients in order, with frozen weights and one row per minibatch."""
    setup = tiny.setup(epochs=epochs, minibatches=8, whiten_advantages=False)
    setup = dataclasses.replace(setup, policy_optimizer=STILL, critic_optimizer=STILL)
    critic = tiny.place(setup.critic, tiny.host_params("scalar", seed=3))
    state = init_ppo_state(setup, tiny.place(setup.policy, tiny.host_params()), critic, jax.random.key(0))
    state, _ = ppo_update(setup, dataclasses.replace(state, step=state.step + step), buffer)
    return np.asarray(optax.tree_utils.tree_get(state.policy.opt_state, "trace")["embedding"], np.float64)


@pytest.mark.slow
def test_each_epoch_visits_every_row_once_in_a_new_order(buffer):
    """A row's weight in the decayed sum of gradients shows its position: .5^0 for the last, .5^7 for the first."""
    setup = tiny.setup(epochs=1, minibatches=8, whiten_advantages=False)

    @jax.jit
    def gradient(part):
        return jax.grad(lambda p: policy_loss(setup, p, part, totals(setup, part), 0.0)[0])(tiny.host_params())

    rows = [jax.tree.map(lambda x: x[row : row + 1], buffer) for row in range(8)]  # noqa: B023
    gradients = np.stack([np.asarray(gradient(part)["embedding"], np.float64).ravel() for part in rows], axis=1)

    def places(trace):
        weights, *_ = np.linalg.lstsq(gradients, trace.ravel(), rcond=None)
        return weights

    first = places(traced(buffer, 1))
    order = np.argsort(first)
    np.testing.assert_allclose(np.sort(first), DECAY ** np.arange(7.0, -1, -1), rtol=0.02)
    # Subtract the first epoch, decayed by eight steps; the rest is the second epoch.
    second = places(traced(buffer, 2)) - DECAY**8 * first
    np.testing.assert_allclose(np.sort(second), DECAY ** np.arange(7.0, -1, -1), rtol=0.02)
    assert (np.argsort(second) != order).any()
    assert (np.argsort(places(traced(buffer, 1, step=1))) != order).any()
    np.testing.assert_array_equal(traced(buffer, 1), traced(buffer, 1))
