"""Combined scores by hand, against a loop, from a batched forward pass, and by finite differences."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.ensembles import COMBINATIONS, combine

SCORES = np.array([[1.0, 0.0, 2.0], [3.0, 0.0, -2.0]])


@pytest.mark.parametrize(
    "how, k, expected",
    [
        ("mean", 1.0, [2, 0, 0]),
        ("min", 1.0, [1, 0, -2]),
        ("mean_minus_std", 1.0, [1, 0, -2]),
        ("mean_minus_std", 0.5, [1.5, 0, -1]),
        ("mean_minus_std", 0.0, [2, 0, 0]),
    ],
)
def test_by_hand(how, k, expected):
    np.testing.assert_allclose(combine(SCORES, how, k), expected, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), members=st.sampled_from([2, 5]))
def test_equals_a_loop_under_a_mask(seed, members):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(rng.normal(0, 5), 1, (members, 6)), rng.random(6) < 0.6
    expected = {how: np.zeros(6) for how in COMBINATIONS}
    for b in np.flatnonzero(mask):
        own = [float(scores[i, b]) for i in range(members)]
        mean = sum(own) / members
        expected["mean"][b], expected["min"][b] = mean, min(own)
        expected["mean_minus_std"][b] = mean - 1.5 * (sum((x - mean) ** 2 for x in own) / members) ** 0.5
    spoilt = np.where(mask[None, :], scores, np.nan)
    for how in COMBINATIONS:
        np.testing.assert_allclose(combine(spoilt, how, 1.5, mask), expected[how], rtol=1e-5, atol=1e-5, err_msg=how)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_agreeing_members_give_their_score_and_a_finite_gradient(how):
    scores = jnp.full((4, 3), 0.7)
    np.testing.assert_allclose(combine(scores, how, 3.0), [0.7] * 3, rtol=1e-6)
    gradient = jax.grad(lambda x: combine(x, how, 3.0).sum())(scores)
    np.testing.assert_allclose(gradient.sum(axis=0), [1, 1, 1], rtol=1e-5)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_the_gradient_is_the_finite_difference(how):
    with jax.enable_x64(True):
        scores = np.random.default_rng(2).normal(size=(3, 4))
        check_grads(jax.jit(lambda x: combine(x, how, 0.7, np.array([1, 1, 0, 1]))), (scores,), order=1, modes=["rev"])
        assert combine(scores, how).dtype == np.float64


@functools.partial(jax.jit, static_argnames="how")
def _gradient(scores, mask, how):
    """Return (gradient of the sum, the summed values)."""

    def total(scores):
        combined = combine(scores, how, mask=mask)
        return combined.sum(), combined

    return jax.grad(total, has_aux=True)(scores)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_masked_rows_change_nothing_on_either_side(how):
    alone = combine(SCORES, how)
    for before, garbage in itertools.product((0, 2), (999.0, np.inf, np.nan)):
        place = (before, 2 - before)
        padded, mask = np.pad(SCORES, ((0, 0), place), constant_values=garbage), np.pad(np.ones(3), place)
        gradient, combined = _gradient(padded, mask, how)
        np.testing.assert_allclose(combined, np.pad(alone, place), rtol=1e-6)
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[:, mask == 0].any()
        np.testing.assert_array_equal(_gradient(padded, np.zeros(5), how)[1], np.zeros(5))


def test_one_batched_forward_pass_gives_the_scores_of_each_member():
    # As in the real forward pass: parameters are stacked on a leading axis, and the batch is shared.
    rng = np.random.default_rng(3)
    members = [{"head": rng.normal(size=4)} for _ in range(3)]
    features = rng.normal(size=(5, 4))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    scores = jax.vmap(lambda params, x: x @ params["head"], in_axes=(0, None))(stacked, features)
    expected = [min(float(row @ member["head"]) for member in members) for row in features]
    np.testing.assert_allclose(combine(scores, "min"), expected, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_one_member_is_refused():
    np.testing.assert_array_equal(combine(SCORES[:1], "mean"), SCORES[0])
    np.testing.assert_array_equal(combine(SCORES[:1], "min"), SCORES[0])
    with pytest.raises(ValueError, match="K, the members of scores_KxB, is 1; at least 2"):
        combine(SCORES[:1], "mean_minus_std")
    with pytest.raises(ValueError, match="is 0; at least 1"):
        combine(SCORES[:0], "mean")


def test_nan_from_one_member_is_not_hidden():
    scores = np.array([[1.0, 2.0], [np.nan, 2.0]])
    for how in COMBINATIONS:
        np.testing.assert_array_equal(combine(scores, how), [np.nan, 2.0])


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="how is 'median'; one of mean, min"):
        combine(SCORES, "median")
    with pytest.raises(ValueError, match="k is -1.0; at least 0"):
        combine(SCORES, "mean_minus_std", -1.0)
    with pytest.raises(ValueError, match=r"scores_KxB has shape \(3,\); \[K, B\]"):
        combine(SCORES[0])
    with pytest.raises(ValueError, match=r"mask has shape \(2,\); \[B\] = \(3,\)"):
        combine(SCORES, mask=np.ones(2))
