"""Importance weights by hand and against a loop over the tokens of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.algorithms.importance import LEVELS, MODES, effective_sample_share, importance_weights

# Ratios 4, 1/2, 1 | 1/8, 2 and a masked position.
LOGPROBS = np.log(np.array([[4.0, 0.5, 1.0], [0.125, 2.0, 99.0]]))
BEHAVIOUR, MASK = np.zeros((2, 3)), np.array([[1, 1, 1], [1, 1, 0]])
# Products 2 and 1/4; geometric means 2^(1/3) and 1/2.
RATIOS = {
    "token": [[4, 0.5, 1], [0.125, 2, 0]],
    "sequence": [[2, 2, 2], [0.25, 0.25, 0]],
    "geometric": [[2 ** (1 / 3)] * 3, [0.5, 0.5, 0]],
}


@pytest.mark.parametrize("level", LEVELS)
def test_unbounded_weights_by_hand(level):
    weights, stats = importance_weights(LOGPROBS, BEHAVIOUR, MASK, level, high=np.inf)
    np.testing.assert_allclose(weights, RATIOS[level], rtol=1e-5)
    np.testing.assert_allclose(stats.ratio, np.where(MASK, RATIOS[level], 1), rtol=1e-5)
    assert not np.asarray(stats.outside).any()


def test_bounds_by_hand():
    outside = [[True, False, False], [True, False, False]]
    weights, stats = importance_weights(LOGPROBS, BEHAVIOUR, MASK, low=0.25, high=3.0)
    np.testing.assert_allclose(weights, [[3, 0.5, 1], [0.25, 2, 0]], rtol=1e-6)
    np.testing.assert_array_equal(stats.outside, outside)
    np.testing.assert_allclose(stats.ratio, np.where(MASK, RATIOS["token"], 1), rtol=1e-6)
    weights, stats = importance_weights(LOGPROBS, BEHAVIOUR, MASK, mode="mask", low=0.25, high=3.0)
    np.testing.assert_allclose(weights, [[0, 0.5, 1], [0, 2, 0]], rtol=1e-6)
    np.testing.assert_array_equal(stats.outside, outside)
    # A response is dropped as a whole.
    weights, _ = importance_weights(LOGPROBS, BEHAVIOUR, MASK, "sequence", "mask", 0.5, 3.0)
    np.testing.assert_allclose(weights, [[2, 2, 2], [0, 0, 0]], rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), level=st.sampled_from(LEVELS), mode=st.sampled_from(MODES))
def test_equals_a_loop_under_any_mask(seed, level, mode):
    rng = np.random.default_rng(seed)
    logprobs, behaviour = rng.normal(-1, 0.7, (2, 4, 5))
    mask = rng.random((4, 5)) < rng.uniform(0, 1)
    low, high = rng.uniform(0, 0.9), rng.uniform(1, 2)
    expected = np.zeros((4, 5))
    for b in range(4):
        own = [logprobs[b, t] - behaviour[b, t] for t in range(5) if mask[b, t]]
        for t in np.flatnonzero(mask[b]):
            log_ratio = {"token": logprobs[b, t] - behaviour[b, t], "sequence": sum(own), "geometric": np.mean(own)}[level]
            ratio = np.exp(log_ratio)
            if low <= ratio <= high:
                expected[b, t] = ratio
            elif mode == "truncate":
                expected[b, t] = min(max(ratio, low), high)
    logprobs, behaviour = np.where(mask, logprobs, np.nan), np.where(mask, behaviour, -np.inf)
    function = jax.jit(importance_weights, static_argnums=(3, 4))
    weights, _ = function(logprobs, behaviour, mask, level, mode, low, high)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_padding_side_and_length_change_nothing(level):
    places = [2, 3, 5]
    wide = np.full((2, 2, 7), np.inf)
    wide[:, :, places] = LOGPROBS, BEHAVIOUR
    mask = np.zeros((2, 7))
    mask[:, places] = MASK
    weights, _ = importance_weights(*wide, mask, level)
    alone, _ = importance_weights(LOGPROBS, BEHAVIOUR, MASK, level)
    np.testing.assert_allclose(np.asarray(weights)[:, places], alone, rtol=1e-6)
    assert not np.asarray(weights)[mask == 0].any()


@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_have_weight_1_and_no_gradient(level):
    logprobs = jnp.array([[-1.0, -2.5, -0.3]])
    weights, _ = importance_weights(logprobs, logprobs, np.ones((1, 3)), level)
    np.testing.assert_array_equal(weights, np.ones((1, 3)))

    def total(x, y):
        return jnp.sum(importance_weights(x, y, np.ones((1, 3)), level)[0])

    for gradient in jax.grad(total, argnums=(0, 1))(logprobs, logprobs - 0.1):
        np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


def test_all_masked_rows_and_overflowing_ratios_are_harmless():
    weights, stats = importance_weights(np.full((1, 3), np.nan), np.zeros((1, 3)), np.zeros((1, 3)), "sequence")
    np.testing.assert_array_equal(weights, np.zeros((1, 3)))
    np.testing.assert_array_equal(stats.ratio, np.ones((1, 3)))
    weights, stats = importance_weights(np.full((1, 3), 900.0), np.zeros((1, 3)), np.ones((1, 3)), "sequence")
    np.testing.assert_array_equal(weights, np.full((1, 3), 2))
    assert np.isfinite(stats.ratio).all()
    assert np.asarray(stats.outside).all()


def test_effective_sample_share_by_hand():
    # Weights 1, 3: 16 / (2 * 10). One of four: 1/4. The scale of the weights does not matter.
    assert float(effective_sample_share(np.array([1.0, 3.0, 77.0]), np.array([1, 1, 0]))) == pytest.approx(0.8)
    assert float(effective_sample_share(np.array([0.0, 1e30, 0, 0]), np.ones(4))) == pytest.approx(0.25)
    assert float(effective_sample_share(np.full((2, 3), 0.7), np.ones((2, 3)))) == pytest.approx(1)
    assert float(effective_sample_share(np.full((2, 3), np.nan), np.zeros((2, 3)))) == 0
    assert float(effective_sample_share(np.zeros(3), np.ones(3))) == 0


def test_bad_arguments_are_refused():
    arguments = np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 2))
    with pytest.raises(ValueError, match="level is 'batch'; one of token, sequence, geometric"):
        importance_weights(*arguments, level="batch")
    with pytest.raises(ValueError, match="mode is 'clip'; one of truncate, mask"):
        importance_weights(*arguments, mode="clip")
    with pytest.raises(ValueError, match="high is 0.0; a number above 0"):
        importance_weights(*arguments, high=0.0)
    with pytest.raises(ValueError, match="low is -1.0; at least 0"):
        importance_weights(*arguments, low=-1.0)
    with pytest.raises(ValueError, match="high - low is -1.0; at least 0"):
        importance_weights(*arguments, low=3.0, high=2.0)
    with pytest.raises(ValueError, match="the same shape"):
        importance_weights(np.zeros((1, 2)), np.zeros((1, 1)), np.ones((1, 2)))
    with pytest.raises(ValueError, match=r"logprobs has shape \(2,\); \[B, N\]"):
        importance_weights(np.zeros(2), np.zeros(2), np.ones(2))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_effective_sample_share_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    weights, mask = rng.gamma(0.5, 2.0, (3, 4)), rng.random((3, 4)) < rng.uniform(0, 1)
    own = [w for w, kept in zip(weights.ravel(), mask.ravel(), strict=True) if kept]
    expected = sum(own) ** 2 / (len(own) * sum(w * w for w in own)) if own else 0
    found = effective_sample_share(np.where(mask, weights, np.nan), mask)
    assert float(found) == pytest.approx(expected, rel=1e-5)
