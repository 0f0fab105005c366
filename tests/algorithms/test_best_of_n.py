"""Best-of-n against worked figures, all subsets, and a loop; its KL against the explicit distribution."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.best_of_n import analytic_kl, best_of, expected_best_of, rejection_sample

# Jitted with n as an argument: one compilation serves every n.
_expected_best_of = jax.jit(expected_best_of)
_best_of = jax.jit(best_of, static_argnums=1)
_rejection_sample = jax.jit(rejection_sample, static_argnums=(1, 3))


def test_the_kl_gives_the_worked_figures():
    np.testing.assert_allclose(analytic_kl(np.array([4, 16, 64])), [0.6363, 1.8351, 3.1745], atol=5e-5)
    assert float(analytic_kl(1)) == 0


def test_the_kl_equals_that_of_a_choice_among_many_equally_likely_responses():
    # Of M responses, the one of rank i from the bottom is chosen with probability (i / M)^n - ((i - 1) / M)^n.
    edges = np.arange(100_001) / 100_000
    for n in (2, 8):
        chosen = np.diff(edges**n)
        assert float(analytic_kl(n)) == pytest.approx(np.sum(chosen * np.log(chosen * 100_000)), abs=1e-4)


def test_best_of_by_hand():
    scores = np.array([0.1, 0.9, 0.5, -2.0, -1.0, -1.0])
    index, found = _best_of(scores, 3)
    np.testing.assert_array_equal(index, [1, 4])
    np.testing.assert_array_equal(found, [True, True])
    assert index.dtype == jnp.int32
    # Masked, NaN and infinite rows are not chosen, and a group without any other row is marked.
    index, found = best_of(np.array([0.1, 0.9, np.nan, np.inf, np.nan, -7.0]), 2, np.array([1, 0, 1, 1, 1, 1]))
    np.testing.assert_array_equal(index[jnp.array([0, 2])], [0, 5])
    np.testing.assert_array_equal(found, [True, False, True])
    assert 2 <= int(index[1]) <= 3
    np.testing.assert_array_equal(best_of(scores, 1).index, np.arange(6))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.sampled_from([1, 6]), most=st.sampled_from([None, 2, 9]))
def test_choices_equal_a_loop(seed, n, most):
    rng = np.random.default_rng(seed)
    # Few distinct scores, so that ties occur.
    scores, mask = rng.integers(-2, 3, 12) / 2, rng.random(12) < 0.7
    scores = np.where(rng.random(12) < 0.1, np.nan, scores)
    choice, kept = _best_of(scores, n, mask), np.asarray(_rejection_sample(scores, n, 0.0, most, mask))
    for group, start in enumerate(range(0, 12, n)):
        rows = [b for b in range(start, start + n) if mask[b] and not np.isnan(scores[b])]
        assert bool(choice.found[group]) == bool(rows)
        if rows:
            assert int(choice.index[group]) == max(rows, key=lambda b: (scores[b], -b))
        above = sorted((b for b in rows if scores[b] >= 0), key=lambda b: (-scores[b], b))[:most]
        assert sorted(above) == [b for b in range(start, start + n) if kept[b]]


def test_rejection_sampling_by_hand():
    scores = np.array([0.2, 1.0, 0.7, 1.0, -1.0, 0.5])
    np.testing.assert_array_equal(rejection_sample(scores, 3, 0.7), [0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(rejection_sample(scores, 3, np.array([1.0, 0.5])), [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(rejection_sample(scores, 3, -9.0, most=1), [0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(rejection_sample(scores, 6, -9.0, most=1), [0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(rejection_sample(scores, 3, -np.inf, mask=np.zeros(6)), np.zeros(6, bool))


def test_the_expected_best_by_hand():
    # 1, 2, 4 have the pairs (1, 2), (1, 4), (2, 4): the best are 2, 4, 4.
    scores = np.array([4.0, 1.0, 2.0])
    np.testing.assert_allclose([_expected_best_of(scores, n) for n in (1, 2, 3)], [7 / 3, 10 / 3, 4], rtol=1e-6)
    # Value the choices by another score: in (1, 2), (1, 4), (2, 4) the gold values are 30, 20, 20.
    np.testing.assert_allclose(_expected_best_of(scores, 2, np.array([20.0, 99.0, 30.0])), 70 / 3, rtol=1e-6)
    # Of equal scores the first is chosen: the pairs of (5, 5, 1) have the values 10, 10, 20.
    np.testing.assert_allclose(_expected_best_of(np.array([5.0, 5.0, 1.0]), 2, np.array([10.0, 20.0, 30.0])), 40 / 3, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 7))
def test_the_expected_best_is_the_mean_over_all_subsets(seed, n):
    rng = np.random.default_rng(seed)
    scores, values = rng.normal(0, 3, (2, 2, 7))
    mask = rng.random((2, 7)) < 0.8
    expected = {"scores": np.zeros(2), "values": np.zeros(2)}
    for row in range(2):
        subsets = list(itertools.combinations(np.flatnonzero(mask[row]), n))
        if subsets:
            chosen = [max(subset, key=lambda i, r=row: scores[r, i]) for subset in subsets]
            expected["scores"][row] = np.mean([scores[row, i] for i in chosen])
            expected["values"][row] = np.mean([values[row, i] for i in chosen])
    spoilt = np.where(mask, scores, np.nan), np.where(mask, values, np.inf)
    np.testing.assert_allclose(_expected_best_of(spoilt[0], n, spoilt[0], mask), expected["scores"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(_expected_best_of(spoilt[0], n, spoilt[1], mask), expected["values"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 4, 64, 1000, 2000])
def test_the_expected_best_is_accurate_for_many_samples(n):
    # For scores 0..N-1 the best of n is n (N + 1) / (n + 1) - 1 on average; the binomials have 600 digits here.
    count = 2000
    expected = n * (count + 1) / (n + 1) - 1
    scores = np.random.default_rng(0).permutation(count)
    assert float(_expected_best_of(scores, n)) == pytest.approx(expected, rel=1e-5)
    binomial = [math.comb(i, n - 1) / math.comb(count, n) for i in range(count)]
    assert float(_expected_best_of(scores, n, np.sqrt(scores))) == pytest.approx(
        sum(w * math.sqrt(i) for i, w in enumerate(binomial)), rel=1e-5
    )


def test_the_estimate_has_no_bias():
    rng = np.random.default_rng(1)
    # The best of 4 uniform numbers is 4/5 on average; 4000 estimates from 8 samples have a standard error of .002.
    estimates = _expected_best_of(rng.random((4000, 8)), 4)
    assert float(jnp.mean(estimates)) == pytest.approx(0.8, abs=0.01)


def test_fewer_samples_than_n_give_0_and_padding_changes_nothing():
    scores, mask = np.array([3.0, 1.0, np.nan, np.inf]), np.array([1, 1, 0, 0])
    for rolled in range(4):
        moved, moved_mask = np.roll(scores, rolled), np.roll(mask, rolled)
        expected = [_expected_best_of(moved, n, None, moved_mask) for n in (1, 2, 3)]
        np.testing.assert_allclose(expected, [2, 3, 0], rtol=1e-6)
    assert float(_expected_best_of(scores, 1, None, np.zeros(4, int))) == 0
    # A non-finite score does not count, with a mask or without.
    assert float(expected_best_of(scores, 2)) == pytest.approx(3)
    gradient = jax.grad(lambda x: _expected_best_of(x, 2, None, mask))(jnp.asarray(scores))
    np.testing.assert_allclose(gradient, [1, 0, 0, 0], rtol=1e-6)


def test_the_gradient_is_the_finite_difference():
    with jax.enable_x64(True):
        scores, mask = np.random.default_rng(4).normal(size=6), np.array([1, 1, 1, 0, 1, 1])
        check_grads(lambda s: _expected_best_of(s, 3, None, mask), (scores,), order=1, modes=["rev"])
        check_grads(lambda v: _expected_best_of(scores, 3, v, mask), (scores,), order=1, modes=["rev"])
        assert _expected_best_of(scores, 3, None, mask).dtype == np.float64


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="n is 0; at least 1"):
        analytic_kl(0)
    for function in (best_of, lambda scores, n: rejection_sample(scores, n, 0.0)):
        with pytest.raises(ValueError, match="scores has 4 rows; a multiple of n = 3 is expected"):
            function(np.zeros(4), 3)
        with pytest.raises(ValueError, match="n is 0; at least 1"):
            function(np.zeros(4), 0)
        with pytest.raises(ValueError, match=r"scores has shape \(2, 2\); \[B\]"):
            function(np.zeros((2, 2)), 2)
    with pytest.raises(ValueError, match="the same shape"):
        best_of(np.zeros(4), 2, np.ones(2))
    with pytest.raises(ValueError, match=r"threshold has shape \(4,\); \[B / n\] = \(2,\)"):
        rejection_sample(np.zeros(4), 2, np.zeros(4))
    with pytest.raises(ValueError, match="most is 0; at least 1"):
        rejection_sample(np.zeros(4), 2, 0.0, 0)
    with pytest.raises(ValueError, match=r"n is 5; in \[1, 4\]"):
        expected_best_of(np.zeros(4), 5)
    with pytest.raises(ValueError, match="scores is a scalar"):
        expected_best_of(np.float32(1), 1)
    with pytest.raises(ValueError, match="the same shape"):
        expected_best_of(np.zeros(4), 2, np.zeros(3))
