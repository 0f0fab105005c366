"""Group advantages against worked figures and a loop over the scores of each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.groups import broadcast_to_tokens, grpo, informative_groups, remax, rloo

# Each is a function of (scores, group size, mask).
PLAIN = {
    "rloo": rloo,
    "grpo": lambda s, g, m=None: grpo(s, g, "std", m),
    "grpo, biased": lambda s, g, m=None: grpo(s, g, "std", m, unbiased=False),
    "grpo, none": lambda s, g, m=None: grpo(s, g, "none", m),
}
ESTIMATORS = {name: jax.jit(function, static_argnums=1) for name, function in PLAIN.items()}
GRADIENTS = {
    name: jax.jit(jax.grad(lambda s, g, m, f=function: jnp.sum(f(s, g, m) ** 2)), static_argnums=1)
    for name, function in PLAIN.items()
}


def test_leave_one_out_gives_the_worked_figures():
    np.testing.assert_allclose(ESTIMATORS["rloo"](np.arange(1, 7), 3), [-1.5, 0, 1.5, -1.5, 0, 1.5], rtol=1e-6)


def test_grpo_by_hand():
    # 1, 2, 3: mean 2, Bessel-corrected deviation 1, biased sqrt(2/3). 0, 0, 3: mean 1, deviations sqrt 3 and sqrt 2.
    scores = np.array([1.0, 2.0, 3.0, 0.0, 0.0, 3.0])
    bessel = np.array([-1, 0, 1, -1 / np.sqrt(3), -1 / np.sqrt(3), 2 / np.sqrt(3)])
    biased = np.array([-np.sqrt(1.5), 0, np.sqrt(1.5), -1 / np.sqrt(2), -1 / np.sqrt(2), np.sqrt(2)])
    np.testing.assert_allclose(grpo(scores, 3, eps=0.0), bessel, rtol=1e-6)
    np.testing.assert_allclose(grpo(scores, 3), bessel, rtol=2e-6)
    np.testing.assert_allclose(grpo(scores, 3, eps=0.0, unbiased=False), biased, rtol=1e-6)
    np.testing.assert_allclose(grpo(scores, 3, "none"), [-1, 0, 1, -1, -1, 2], rtol=1e-6)
    # Epsilon is added to the deviation, not to the variance: 1 / (1 + 1).
    np.testing.assert_allclose(grpo(scores, 3, eps=1.0)[:3], [-0.5, 0, 0.5], rtol=1e-6)


def test_remax_by_hand():
    np.testing.assert_allclose(remax(np.array([1, 0, 2]), np.array([0.5, 0.5, 2.0])), [0.5, -0.5, 0])
    masked = remax(np.array([1.0, np.nan]), np.array([0.5, np.inf]), np.array([1, 0]))
    np.testing.assert_allclose(masked, [0.5, 0])


def test_informative_groups_by_hand():
    function = jax.jit(informative_groups, static_argnums=1)
    scores = np.array([1.0, 1, 0, 0, 0, 1, 0.3, 0.3])
    np.testing.assert_array_equal(function(scores, 2), [0, 0, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(function(scores, 4), [1, 1, 1, 1, 1, 1, 1, 1])
    # The score of a padding row does not count as different, and the row itself is never informative.
    mask = np.array([1, 1, 1, 0, 1, 1, 1, 0])
    padded = np.where(mask, scores, 7)
    np.testing.assert_array_equal(function(padded, 2, mask), [0, 0, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(function(np.array([np.nan, 1.0]), 2), [False, False])
    np.testing.assert_array_equal(function(scores, 1), np.zeros(8, bool))


def test_tokens_get_the_advantage_of_their_row():
    tokens = broadcast_to_tokens(np.array([1.5, -2.0, np.nan]), np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]]))
    np.testing.assert_array_equal(tokens, [[1.5, 1.5, 0], [0, -2, -2], [0, 0, 0]])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), group_size=st.sampled_from([2, 6]))
def test_equal_a_loop_under_any_mask(seed, group_size):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(rng.normal(0, 3), 1, 12), rng.random(12) < rng.uniform(0, 1)
    expected = {name: np.zeros(12) for name in ESTIMATORS}
    informative = np.zeros(12, bool)
    for start in range(0, 12, group_size):
        rows = [b for b in range(start, start + group_size) if mask[b]]
        own = [scores[b] for b in rows]
        for b in rows if len(rows) > 1 else []:
            others = [scores[other] for other in rows if other != b]
            expected["rloo"][b] = scores[b] - np.mean(others)
            expected["grpo, none"][b] = scores[b] - np.mean(own)
            expected["grpo"][b] = (scores[b] - np.mean(own)) / (np.std(own, ddof=1) + 1e-6)
            expected["grpo, biased"][b] = (scores[b] - np.mean(own)) / (np.std(own) + 1e-6)
            informative[b] = len(set(own)) > 1
    spoilt = np.where(mask, scores, np.nan)
    for name, function in ESTIMATORS.items():
        np.testing.assert_allclose(function(spoilt, group_size, mask), expected[name], rtol=1e-3, atol=2e-5, err_msg=name)
    found = jax.jit(informative_groups, static_argnums=1)(spoilt, group_size, mask)
    np.testing.assert_array_equal(found, informative)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("level", [0.0, 0.1, 1 / 3, -7.3, 12345.678])
def test_equal_scores_give_exactly_zero(name, level):
    # With and without jit, because fusion changes rounding.
    for group_size in (3, 7):
        np.testing.assert_array_equal(ESTIMATORS[name](np.full(42, level), group_size), np.zeros(42))
    np.testing.assert_array_equal(PLAIN[name](np.full(6, level), 3), np.zeros(6))
    np.testing.assert_array_equal(grpo(np.full(6, level), 3, eps=0.0), np.zeros(6))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_the_only_valid_row_of_a_group_gives_exactly_zero(name, garbage):
    scores, mask = jnp.array([5.0, garbage, garbage, 1.0, 2.0, 3.0]), np.array([1, 0, 0, 1, 1, 1])
    value = ESTIMATORS[name](scores, 3, mask)
    np.testing.assert_array_equal(value[:3], [0, 0, 0])
    np.testing.assert_allclose(value[3:], ESTIMATORS[name](jnp.arange(1.0, 4), 3), rtol=1e-6)
    gradient = GRADIENTS[name](scores, 3, mask)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:3], [0, 0, 0])
    np.testing.assert_array_equal(ESTIMATORS[name](jnp.full(6, jnp.nan), 3, np.zeros(6, int)), np.zeros(6))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_within_a_group_and_the_other_groups_do_not_matter(name):
    scores = np.random.default_rng(0).normal(size=12)
    value = np.asarray(ESTIMATORS[name](scores, 6))
    np.testing.assert_allclose(ESTIMATORS[name](scores[::-1], 6), value[::-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ESTIMATORS[name](scores[:6], 6), value[:6], rtol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_is_the_finite_difference(name):
    with jax.enable_x64(True):
        scores, mask = np.random.default_rng(4).normal(size=6), np.array([1, 1, 1, 1, 0, 1])
        check_grads(jax.jit(lambda s: PLAIN[name](s, 3, mask)), (scores,), order=1, modes=["rev"])
        assert jax.eval_shape(lambda s: PLAIN[name](s, 3), scores).dtype == np.float64


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_unmasked_nan_affects_only_its_group(name):
    value = np.asarray(ESTIMATORS[name](np.array([1.0, np.nan, 2.0, 1.0, 2.0, 3.0]), 3))
    assert np.isnan(value[:3]).all()
    assert np.isfinite(value[3:]).all()


def test_integer_scores_are_cast_to_float():
    np.testing.assert_allclose(ESTIMATORS["rloo"](np.array([0, 1, 1]), 3), [-1, 0.5, 0.5])
    for function in PLAIN.values():
        narrow = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
        assert jax.eval_shape(lambda s, f=function: f(s, 2), narrow).dtype == jnp.float32


@pytest.mark.parametrize("function", [rloo, grpo])
def test_groups_of_one_and_incomplete_groups_are_refused(function):
    for wrapped in (function, jax.jit(function, static_argnums=1)):
        with pytest.raises(ValueError, match="group_size is 1; at least 2"):
            wrapped(np.zeros(4), 1)
        with pytest.raises(ValueError, match="scores has 4 rows; a multiple of group_size = 3 is expected"):
            wrapped(np.zeros(4), 3)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"scores has shape \(2, 2\); \[B\]"):
        rloo(np.zeros((2, 2)), 2)
    with pytest.raises(ValueError, match=r"the same shape: scores \(4,\), mask \(2,\)"):
        rloo(np.zeros(4), 2, mask=np.ones(2))
    with pytest.raises(ValueError, match="scale is 'range'; one of std, none"):
        grpo(np.zeros(4), 2, "range")
    with pytest.raises(ValueError, match="eps is -0.1; at least 0"):
        grpo(np.zeros(4), 2, eps=-0.1)
    with pytest.raises(ValueError, match="the same shape"):
        remax(np.zeros(4), np.zeros(1))
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\); \[B\] = \(2,\)"):
        broadcast_to_tokens(np.zeros(3), np.ones((2, 3)))
    with pytest.raises(ValueError, match="a multiple of group_size = 3"):
        informative_groups(np.zeros(4), 3)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_greedy_baseline_and_the_tokens_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    scores, greedy, counted = rng.normal(size=5), rng.normal(size=5), rng.random(5) < 0.7
    mask = rng.random((5, 3)) < 0.6
    rows, tokens = np.zeros(5), np.zeros((5, 3))
    for b in range(5):
        rows[b] = scores[b] - greedy[b] if counted[b] else 0
        for t in range(3):
            tokens[b, t] = rows[b] if mask[b, t] else 0
    found = remax(np.where(counted, scores, np.nan), np.where(counted, greedy, np.inf), counted)
    np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(broadcast_to_tokens(found, mask), tokens, rtol=1e-5, atol=1e-6)


def test_large_scores_that_differ_little_keep_their_digits():
    """Expected values in exact arithmetic."""
    scores = 1e8 + np.array([0.0, 8.0, 16.0, 24.0])
    np.testing.assert_allclose(rloo(scores.astype(np.float32), 4), [-16, -16 / 3, 16 / 3, 16], rtol=1e-6)
    np.testing.assert_allclose(grpo(scores.astype(np.float32), 4, scale="none"), [-12, -4, 4, 12], rtol=1e-6)
    small = np.float32(1e4) + np.array([0.01, 0.02, 0.05], np.float32)
    exact = np.asarray(small, np.float64)
    np.testing.assert_allclose(rloo(small, 3), 1.5 * (exact - exact.mean()), rtol=1e-6)


@pytest.mark.parametrize("level", [1e-18, 1e-10, 1e20, 1e37])
def test_normalised_scores_do_not_depend_on_their_unit(level):
    found = grpo(np.array([-level, level], np.float32), 2, eps=0.0)
    np.testing.assert_allclose(found, [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-6)
