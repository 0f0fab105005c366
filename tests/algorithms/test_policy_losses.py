"""The clipped surrogate against worked figures, a loop, and finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.policy_losses import clipped_surrogate


def test_gives_the_worked_figures():
    loss, stats = clipped_surrogate(np.array([1.0, -1.0, 0.1]), np.zeros(3), np.ones(3), 0.2, 0.2)
    np.testing.assert_allclose(loss, [-1.2, -0.36788, -1.10517], rtol=1e-5)
    np.testing.assert_allclose(stats.ratio, [np.e, 1 / np.e, np.exp(0.1)], rtol=1e-6)
    # A ratio below the range is not clipped when the advantage is positive: the pessimist's bound is the plain term.
    np.testing.assert_array_equal(stats.clipped, [True, False, False])
    np.testing.assert_allclose(stats.approx_kl, [np.e - 2, 1 / np.e, np.exp(0.1) - 1.1], rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.sampled_from([0.0, 0.1, 0.2]), high=st.sampled_from([0.2, 0.28]))
def test_equals_a_loop(seed, low, high):
    rng = np.random.default_rng(seed)
    logprobs, old = rng.normal(-2, 0.3, (2, 3, 4))
    advantages = rng.normal(size=(3, 4))
    expected, clipped = np.zeros((3, 4)), np.zeros((3, 4), bool)
    for b in range(3):
        for t in range(4):
            ratio = np.exp(logprobs[b, t] - old[b, t])
            plain = ratio * advantages[b, t]
            bounded = min(max(ratio, 1 - low), 1 + high) * advantages[b, t]
            expected[b, t], clipped[b, t] = -min(plain, bounded), bounded < plain
    loss, stats = jax.jit(clipped_surrogate)(logprobs, old, advantages, low, high)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats.clipped, clipped)


def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient():
    logprobs, advantages = jnp.array([[-1.0, -2.0, -0.5]]), jnp.array([[1.0, -0.5, 2.0]])
    gradient = jax.grad(lambda x: clipped_surrogate(x, logprobs, advantages)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)


def test_a_clipped_token_has_no_gradient():
    old, advantages = jnp.zeros(2), jnp.array([1.0, -1.0])
    logprobs = jnp.log(jnp.array([1.3, 0.7]))
    gradient = jax.grad(lambda x: clipped_surrogate(x, old, advantages)[0].sum())(logprobs)
    np.testing.assert_array_equal(gradient, [0, 0])


def test_the_gradient_is_the_finite_difference():
    # Away from the kinks at .8 and 1.2, where the two differ by right.
    with jax.enable_x64(True):
        logprobs = np.log([[0.5, 0.95, 1.1], [1.5, 0.6, 1.05]])
        old, advantages = np.zeros((2, 3)), np.array([[1.0, -2.0, 0.5], [-1.0, -1.0, 3.0]])
        check_grads(lambda x: clipped_surrogate(x, old, advantages)[0], (logprobs,), order=1, modes=["rev"])


def test_no_gradient_reaches_the_sampler_or_the_critic():
    def loss(old, advantages):
        return clipped_surrogate(jnp.full(2, -1.0), old, advantages)[0].sum()

    gradients = jax.grad(loss, argnums=(0, 1))(jnp.array([-1.1, -0.9]), jnp.array([1.0, -1.0]))
    np.testing.assert_array_equal(gradients, np.zeros((2, 2)))


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_masked_tokens_change_nothing_and_have_no_gradient(garbage):
    logprobs, mask = jnp.array([[-1.0, garbage]]), np.array([[1, 0]])
    old, advantages = np.array([[-1.1, 0.0]]), np.array([[1.0, garbage]])
    loss, stats = clipped_surrogate(logprobs, old, advantages, mask=mask)
    np.testing.assert_allclose(loss, [[-np.exp(0.1), 0]], rtol=1e-6)
    np.testing.assert_allclose(stats.ratio, [[np.exp(0.1), 1]], rtol=1e-6)
    assert float(stats.approx_kl[0, 1]) == 0
    assert not bool(stats.clipped[0, 1])
    gradient = jax.grad(lambda x: clipped_surrogate(x, old, advantages, mask=mask)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, [[-np.exp(0.1), 0]], rtol=1e-6)


def test_clips_outside_their_range_are_refused():
    with pytest.raises(ValueError, match=r"clip_low is 1.2; in \[0, 1\]"):
        clipped_surrogate(np.zeros(1), np.zeros(1), np.zeros(1), 1.2, 0.2)
    with pytest.raises(ValueError, match="clip_high is -0.2; at least 0"):
        clipped_surrogate(np.zeros(1), np.zeros(1), np.zeros(1), 0.2, -0.2)
