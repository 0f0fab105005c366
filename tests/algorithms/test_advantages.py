"""GAE against worked figures and against its definition as a sum over future errors, step by step in numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.algorithms.advantages import gae


def _row(*numbers: float) -> np.ndarray:
    return np.array([numbers])


def test_terminal_rows_give_the_worked_figures():
    advantages, returns = gae(_row(0, 0, 1), _row(0.5, 0.4, 0.3), _row(1, 1, 1), 1.0, 0.95)
    np.testing.assert_allclose(advantages, _row(0.43675, 0.565, 0.7), rtol=1e-6)
    np.testing.assert_allclose(returns, _row(0.93675, 0.965, 1), rtol=1e-6)


def test_discounted_returns_give_the_worked_figures():
    _, returns = gae(_row(0, 0, 0, 1), _row(0, 0, 0, 1), _row(1, 1, 1, 1), 0.9, 0.95)
    np.testing.assert_allclose(returns, _row(0.65792, 0.7695, 0.9, 1), atol=5e-6)


def test_an_episode_end_inside_gives_the_worked_figures():
    discounts = _row(0.9, 0.9, 0.9, 0, 0.9)
    advantages, _ = gae(
        _row(0, 0, 0, 0, 1), _row(-3, -2, -1, 0, 5), np.ones((1, 5)), discounts, 0.7, bootstrap_value=np.array([-1.0])
    )
    np.testing.assert_allclose(advantages, _row(2.2899, 1.73, 1, 0, -4.9), rtol=1e-6, atol=1e-6)


def test_returns_are_the_lambda_returns_of_the_worked_figures():
    # The value before the first step enters its advantage alone, so any will do.
    values, bootstrap = _row(17, 3, 1, 5, -5), np.array([3.0])
    _, returns = gae(_row(1, 0, -1, 0, 1), values, np.ones((1, 5)), _row(0.5, 0.9, 1, 0.5, 0.8), 0.75, bootstrap)
    np.testing.assert_allclose(returns, _row(1.64605469, 0.7228125, 0.7375, 0.65, 3.4), rtol=1e-5)


def _by_definition(rewards, values, mask, gamma, lam, bootstrap):
    """Equation 16 of the paper on the unmasked steps alone: the sum of the errors ahead, discounted on their way."""
    advantages = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        steps = np.flatnonzero(mask[b])
        following = [*(values[b, t] for t in steps[1:]), bootstrap[b]]
        # `following` has one too many where a row has no step at all.
        errors = [rewards[b, t] + gamma[b, t] * v - values[b, t] for t, v in zip(steps, following, strict=False)]
        for start, t in enumerate(steps):
            weight = 1.0
            for ahead in range(start, len(steps)):
                advantages[b, t] += weight * errors[ahead]
                weight *= gamma[b, steps[ahead]] * lam
    return advantages, np.where(mask, advantages + values, 0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_equals_the_definition_under_any_mask(seed, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 3, 7))
    gamma, bootstrap = rng.choice([0, 0.9, 1], size=(3, 7)), rng.normal(size=3)
    mask = rng.random((3, 7)) < rng.uniform(0, 1)
    expected = _by_definition(rewards, values, mask, gamma, lam, bootstrap)
    values, rewards = np.where(mask, values, 999), np.where(mask, rewards, np.nan)
    advantages, returns = jax.jit(gae)(rewards, values, mask, gamma, lam, bootstrap)
    np.testing.assert_allclose(advantages, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, expected[1], rtol=1e-5, atol=1e-5)


def test_a_cut_response_is_bootstrapped_past_its_padding():
    # One step with gamma 1, lambda 1: advantage r + V_next - V, whatever padding follows.
    advantages, returns = gae(_row(0.5, 0), _row(2, 77), _row(1, 0), 1.0, 1.0, bootstrap_value=np.array([3.0]))
    np.testing.assert_allclose(advantages, _row(1.5, 0))
    np.testing.assert_allclose(returns, _row(3.5, 0))


def test_rows_do_not_touch():
    rng = np.random.default_rng(3)
    rewards, values = rng.normal(size=(2, 4, 5))
    mask = np.arange(5)[None, :] < np.array([5, 2, 0, 3])[:, None]
    together = gae(rewards, values, mask, 0.99, 0.95)
    for b in range(4):
        alone = gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], 0.99, 0.95)
        np.testing.assert_array_equal(together[0][b : b + 1], alone[0])
        np.testing.assert_array_equal(together[1][b : b + 1], alone[1])
    assert not np.asarray(together[0])[2].any()


def test_integer_rewards_are_not_rounded_away():
    advantages, _ = gae(np.array([[0, 1]]), np.array([[0, 0]]), np.ones((1, 2), bool), 0.5, 0.5)
    np.testing.assert_allclose(advantages, _row(0.25, 1))


def test_lambda_and_gamma_outside_their_range_are_refused():
    arguments = _row(0.0), _row(0.0), _row(1)
    with pytest.raises(ValueError, match=r"lam is 1.5; in \[0, 1\]"):
        gae(*arguments, 1.0, 1.5)
    with pytest.raises(ValueError, match=r"gamma is -0.1; in \[0, 1\]"):
        gae(*arguments, -0.1, 0.5)
    with pytest.raises(ValueError, match=r"bootstrap_value has shape \(2,\)"):
        gae(*arguments, 1.0, 0.5, np.zeros(2))
    with pytest.raises(ValueError, match=r"gamma has shape \(1, 3\)"):
        gae(*arguments, np.ones((1, 3)), 0.5)
