"""Value losses by hand, against a loop and by finite differences; explained variance by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.value_losses import clipped_value_loss, explained_variance, huber_value_loss


def test_by_hand():
    # A change of .5 from 0 is clipped to .2. Return 1: (.5-1)^2 = .25 < (.2-1)^2 = .64, clipped. Return -1: 2.25 > 1.44.
    values, old, returns = np.array([0.5, 0.5, 0.1]), np.zeros(3), np.array([1.0, -1.0, 1.0])
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.2)
    np.testing.assert_allclose(loss, [0.32, 1.125, 0.405], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [True, False, False])


def test_none_disables_the_clip_and_zero_does_not():
    values, old, returns = np.array([0.5]), np.zeros(1), np.array([1.0])
    np.testing.assert_allclose(clipped_value_loss(values, old, returns, None)[0], [0.125])
    np.testing.assert_allclose(clipped_value_loss(values, old, returns, 0.0)[0], [0.5])
    around = jnp.asarray([-1e-7, 0.0, 1e-7])  # Rounding of a second pass is no change.
    gradient = jax.grad(lambda x: clipped_value_loss(x, np.zeros(3), np.ones(3), 0.0)[0].sum())(around)
    np.testing.assert_array_equal(gradient, np.zeros(3))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), clip=st.sampled_from([0.05, 0.2, 1.0]))
def test_equals_a_loop(seed, clip):
    values, old, returns = np.random.default_rng(seed).normal(size=(3, 3, 4))
    expected = np.zeros((3, 4))
    for b in range(3):
        for t in range(4):
            bounded = min(max(values[b, t], old[b, t] - clip), old[b, t] + clip)
            expected[b, t] = max((values[b, t] - returns[b, t]) ** 2, (bounded - returns[b, t]) ** 2) / 2
    loss, _ = jax.jit(clipped_value_loss)(values, old, returns, clip)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_is_the_finite_difference(clip):
    with jax.enable_x64(True):
        values, old = np.array([0.5, 0.5, 0.1, -0.7]), np.zeros(4)
        returns = np.array([1.0, -1.0, 1.0, 0.3])
        check_grads(lambda x: clipped_value_loss(x, old, returns, clip)[0], (values,), order=1, modes=["rev"])


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_masked_tokens_change_nothing_and_have_no_gradient(garbage, clip):
    values, old = jnp.array([[0.1, garbage]]), np.array([[0.0, garbage]])
    returns, mask = np.array([[1.0, garbage]]), np.array([[1.0, 0.0]])
    loss, clipped = clipped_value_loss(values, old, returns, clip, mask)
    np.testing.assert_allclose(loss, [[0.405, 0]], rtol=1e-6)
    assert not bool(clipped[0, 1])
    gradient = jax.grad(lambda x: clipped_value_loss(x, old, returns, clip, mask)[0].sum())(values)
    np.testing.assert_allclose(gradient, [[-0.9, 0]], rtol=1e-6)


def test_a_negative_clip_is_refused():
    with pytest.raises(ValueError, match="clip is -0.2; at least 0"):
        clipped_value_loss(np.zeros(1), np.zeros(1), np.zeros(1), -0.2)


def test_explained_variance_by_hand():
    returns, mask = np.array([[1.0, 2.0, 3.0, 99.0]]), np.array([[1, 1, 1, 0]])
    # Returns 1, 2, 3 have variance 2/3. Errors 0, .5, 1 have variance 1/6: 1 - 1/4. A constant offset costs nothing.
    assert float(explained_variance(np.array([[1.0, 1.5, 2.0, -7.0]]), returns, mask)) == pytest.approx(0.75)
    assert float(explained_variance(returns + 5, returns, mask)) == pytest.approx(1)
    assert float(explained_variance(np.full((1, 4), 0.3), returns, mask)) == pytest.approx(0, abs=1e-6)
    assert float(explained_variance(-returns, returns, mask)) == pytest.approx(-3)


def test_explained_variance_of_constant_or_no_returns_is_zero():
    values = np.array([[1.0, 2.0]])
    assert float(explained_variance(values, np.full((1, 2), 0.5), np.ones((1, 2)))) == 0
    assert float(explained_variance(values, values, np.zeros((1, 2)))) == 0


def test_huber_by_hand():
    # Errors .5, -2, 1 with delta 1: .125, 2 - .5, .5. With delta 1/2: .125, .5 (2 - .25), .5 (1 - .25).
    values, returns = np.array([0.5, -1.0, 2.0]), np.array([0.0, 1.0, 1.0])
    np.testing.assert_allclose(huber_value_loss(values, returns)[0], [0.125, 1.5, 0.5])
    np.testing.assert_allclose(huber_value_loss(values, returns, 0.5)[0], [0.125, 0.875, 0.375])
    gradient = jax.grad(lambda x: huber_value_loss(x, returns, 0.5)[0].sum())(jnp.asarray(values))
    np.testing.assert_allclose(gradient, [0.5, -0.5, 0.5])
    # A change of .5 from 0 is clipped to .2. Return 1: error -.5 or -.8, clipped. Return -1: error 1.5 or 1.2.
    loss, clipped = huber_value_loss(np.full(2, 0.5), np.array([1.0, -1.0]), 0.6, None, np.zeros(2), 0.2)
    np.testing.assert_allclose(loss, [0.6 * (0.8 - 0.3), 0.6 * (1.5 - 0.3)], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [True, False])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), clip=st.sampled_from([None, 0.05, 1.0]), delta=st.sampled_from([0.3, 1.0]))
def test_huber_equals_a_loop(seed, clip, delta):
    values, old, returns = np.random.default_rng(seed).normal(size=(3, 3, 4))
    expected = np.zeros((3, 4))
    for b in range(3):
        for t in range(4):
            costs = []
            for value in (values[b, t], min(max(values[b, t], old[b, t] - (clip or 0)), old[b, t] + (clip or 0))):
                size = abs(value - returns[b, t])
                costs.append(0.5 * size**2 if size <= delta else delta * (size - 0.5 * delta))
            expected[b, t] = costs[0] if clip is None else max(costs)
    function = jax.jit(huber_value_loss, static_argnums=5)
    loss, clipped = function(values, returns, delta, None, old, clip)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    # With a delta beyond all errors it equals half the square, and clips the same tokens.
    square, square_clipped = jax.jit(clipped_value_loss, static_argnums=3)(values, old, returns, clip)
    np.testing.assert_allclose(function(values, returns, np.inf, None, old, clip)[0], square, rtol=1e-6)
    np.testing.assert_array_equal(clipped, square_clipped)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_huber_is_the_finite_difference(clip):
    with jax.enable_x64(True):
        values, old = np.array([0.5, 0.5, 0.1, -0.7]), np.zeros(4)
        returns = np.array([1.0, -1.0, 1.0, 0.3])
        loss = jax.jit(lambda x: huber_value_loss(x, returns, 0.7, None, old, clip)[0])
        check_grads(loss, (values,), order=1, modes=["rev"])
        assert huber_value_loss(values, returns)[0].dtype == np.float64


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_huber_ignores_masked_tokens(garbage, clip):
    values, old = jnp.array([[garbage, 0.1]]), np.array([[garbage, 0.0]])
    returns, mask = np.array([[garbage, 1.0]]), np.array([[0.0, 1.0]])
    loss, _ = huber_value_loss(values, returns, 0.5, mask, old, clip)
    np.testing.assert_allclose(loss, [[0, 0.5 * (0.9 - 0.25)]], rtol=1e-6)
    gradient = jax.grad(lambda x: huber_value_loss(x, returns, 0.5, mask, old, clip)[0].sum())(values)
    np.testing.assert_allclose(gradient, [[0, -0.5]], rtol=1e-6)


def test_bad_settings_of_huber_are_refused():
    with pytest.raises(ValueError, match="delta is 0.0; a number above 0"):
        huber_value_loss(np.zeros(1), np.zeros(1), 0.0)
    with pytest.raises(ValueError, match="clip is 0.2, which needs old_values"):
        huber_value_loss(np.zeros(1), np.zeros(1), clip=0.2)
    with pytest.raises(ValueError, match="the same shape"):
        huber_value_loss(np.zeros(2), np.zeros(1))
    with pytest.raises(ValueError, match="clip is -0.2; at least 0"):
        huber_value_loss(np.zeros(1), np.zeros(1), 1.0, None, np.zeros(1), -0.2)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_explained_variance_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    returns = rng.normal(size=(3, 4))
    values, mask = returns + rng.normal(0, rng.uniform(0, 2), (3, 4)), rng.random((3, 4)) < 0.8
    errors = [r - v for r, v, kept in zip(returns.ravel(), values.ravel(), mask.ravel(), strict=True) if kept]
    own = [r for r, kept in zip(returns.ravel(), mask.ravel(), strict=True) if kept]

    def variance(x):
        return sum((y - sum(x) / len(x)) ** 2 for y in x)

    expected = 1 - variance(errors) / variance(own) if len(own) > 1 else 0
    found = explained_variance(np.where(mask, values, np.nan), np.where(mask, returns, np.inf), mask)
    assert float(found) == pytest.approx(expected, rel=1e-3, abs=1e-4)
