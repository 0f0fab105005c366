"""Rewards made from scores: the position of the score, the missing-eos rules, and normalisation."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.rewards import (
    MISSING_EOS,
    combine_scores,
    length_penalty,
    normalise_scores,
    overlong_penalty,
    score_statistics,
    shape_rewards,
)

SCORES = np.array([0.5, -0.25])
KL = np.array([[0.1, 0.2, 0.3], [1.0, -1.0, 7.0]])
LENGTHS = np.array([3, 2])


def test_score_and_penalty_by_hand():
    rewards = shape_rewards(SCORES, KL, 0.1, LENGTHS, np.array([True, True]))
    np.testing.assert_allclose(rewards, [[-0.01, -0.02, 0.47], [-0.1, -0.15, 0]], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "rule, value, expected",
    [("none", None, -0.25), ("replace", -1.0, -1.0), ("penalty", 0.75, -1.0), ("zero", None, 0)],
)
def test_missing_eos_rules_by_hand(rule, value, expected):
    rewards = shape_rewards(SCORES, np.zeros((2, 3)), 0.1, LENGTHS, np.array([True, False]), rule, value)
    # The first response ended, so it keeps its score under every rule.
    np.testing.assert_allclose(rewards, [[0, 0, 0.5], [0, expected, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    "rule, value, expected",
    [("none", None, [0.5, 2, 0]), ("replace", -1.0, [0, -1, 0]), ("penalty", 0.75, [0.5, 1.25, 0]), ("zero", None, [0, 0, 0])],
)
def test_scores_per_token_by_hand(rule, value, expected):
    scores = np.array([[1.0, 2, 3], [0.5, 2, np.nan]])  # The second response has two tokens; nothing after it is read.
    rewards = shape_rewards(scores, np.zeros((2, 3)), 0.1, LENGTHS, np.array([True, False]), rule, value)
    np.testing.assert_allclose(rewards, [[1, 2, 3], expected], rtol=1e-6)


def test_the_kl_penalty_does_not_depend_on_the_missing_eos_rule():
    rewards = shape_rewards(SCORES, KL, 0.1, LENGTHS, np.array([False, False]), "zero")
    np.testing.assert_allclose(rewards, [[-0.01, -0.02, -0.03], [-0.1, 0.1, 0]], rtol=1e-6, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), rule=st.sampled_from(MISSING_EOS))
def test_equals_a_loop(seed, rule):
    rng = np.random.default_rng(seed)
    scores, kl, lengths = rng.normal(size=4), rng.normal(size=(4, 6)), rng.integers(0, 7, size=4)
    ended, coef = rng.random(4) < 0.5, rng.uniform(0, 1)
    expected = np.zeros((4, 6))
    for b in range(4):
        score = scores[b]
        if not ended[b]:
            score = {"none": score, "replace": 2.0, "penalty": score - 2.0, "zero": 0.0}[rule]
        for t in range(lengths[b]):
            expected[b, t] = -coef * kl[b, t] + (score if t == lengths[b] - 1 else 0)
    kl = np.where(np.arange(6)[None, :] < lengths[:, None], kl, np.nan)
    function = jax.jit(shape_rewards, static_argnames="missing_eos")
    rewards = function(scores, kl, coef, lengths, ended, missing_eos=rule, missing_eos_value=2.0)
    np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_refused():
    ended = np.array([True, True])
    with pytest.raises(ValueError, match="missing_eos is 'drop'; one of none, replace, penalty, zero"):
        shape_rewards(SCORES, KL, 0.1, LENGTHS, ended, "drop")
    with pytest.raises(ValueError, match="missing_eos is 'replace', which needs a missing_eos_value"):
        shape_rewards(SCORES, KL, 0.1, LENGTHS, ended, "replace")
    with pytest.raises(ValueError, match=r"missing_eos_value \(subtracted.* is -1.0; at least 0"):
        shape_rewards(SCORES, KL, 0.1, LENGTHS, ended, "penalty", -1.0)
    with pytest.raises(ValueError, match=r"response_length is 4; in \[0, 3\]"):
        shape_rewards(SCORES, KL, 0.1, np.array([4, 1]), ended)
    with pytest.raises(ValueError, match=r"scores has shape \(2, 1\)"):
        shape_rewards(SCORES[:, None], KL, 0.1, LENGTHS, ended)
    with pytest.raises(ValueError, match="kl_coef is -0.1; at least 0"):
        shape_rewards(SCORES, KL, -0.1, LENGTHS, ended)


def test_normalised_scores_by_hand():
    np.testing.assert_allclose(normalise_scores(np.array([1, 3, 11]), 3.0, 2.0), [-1, 0, 4])
    np.testing.assert_allclose(normalise_scores(np.array([1, 3, 11]), 3.0, 2.0, clip=1.5), [-1, 0, 1.5])
    # A clip of 0 is valid, and differs from None.
    np.testing.assert_array_equal(normalise_scores(np.array([1, 3, 11]), 3.0, 2.0, clip=0.0), [0, 0, 0])


def test_clipping_leaves_a_score_that_is_not_finite_as_it_is():
    scores = np.array([np.inf, -np.inf, np.nan, 9.0])
    np.testing.assert_array_equal(normalise_scores(scores, 0.0, 1.0, clip=5.0), [np.inf, -np.inf, np.nan, 5.0])


def test_statistics_normalise_their_own_scores():
    scores, mask = np.array([2.0, 4.0, 6.0, 999.0]), np.array([1, 1, 1, 0])
    shift, scale = score_statistics(scores, mask)
    assert float(shift) == pytest.approx(4)
    assert float(scale) == pytest.approx(np.sqrt(8 / 3), rel=1e-6)
    normalised = np.asarray(normalise_scores(scores, shift, scale))[:3]
    assert normalised.mean() == pytest.approx(0, abs=1e-6)
    assert normalised.std() == pytest.approx(1, rel=1e-6)


def test_equal_scores_have_scale_1():
    shift, scale = score_statistics(np.array([0.7, 0.7, 0.7]))
    assert float(shift) == pytest.approx(0.7)
    assert float(scale) == 1


def test_a_scale_of_zero_is_refused():
    with pytest.raises(ValueError, match="scale is 0.0; a number above 0"):
        normalise_scores(np.zeros(2), 0.0, 0.0)
    with pytest.raises(ValueError, match="clip is -1.0; at least 0"):
        normalise_scores(np.zeros(2), 0.0, 1.0, clip=-1.0)


def test_combined_scores_by_hand():
    scores, weights = np.array([[1.0, 2.0, 3.0], [10.0, 0.0, -10.0]]), np.array([1.0, 0.5])
    combined, kept = combine_scores(scores, weights)
    np.testing.assert_allclose(combined, [6, 2, -2])
    assert np.asarray(kept).all()
    combined, _ = combine_scores(np.array([[1, 0, 1]]), np.array([2]))
    np.testing.assert_array_equal(combined, np.array([2, 0, 2], np.float32))


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_a_dropped_score_drops_its_row_and_no_other(garbage):
    scores, mask = np.array([[1.0, garbage, 3.0], [10.0, 0.0, garbage]]), np.array([[1, 0, 1], [1, 1, 0]])
    combined, kept = combine_scores(scores, np.array([1.0, 0.5]), mask)
    np.testing.assert_allclose(combined, [6, 0, 0])
    np.testing.assert_array_equal(kept, [True, False, False])
    # A missing score with weight 0 drops nothing.
    combined, kept = combine_scores(scores, np.array([1.0, 0.0]), mask)
    np.testing.assert_allclose(combined, [1, 0, 3])
    np.testing.assert_array_equal(kept, [True, False, True])


def test_a_non_finite_score_is_dropped_without_a_mask():
    scores = np.array([[1.0, np.nan, np.inf, -np.inf], [1.0, 1.0, 1.0, 1.0]])
    combined, kept = jax.jit(combine_scores)(scores, np.array([1.0, 1.0]))
    np.testing.assert_array_equal(combined, [2, 0, 0, 0])
    np.testing.assert_array_equal(kept, [True, False, False, False])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_combined_scores_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    scores, weights, mask = rng.normal(size=(3, 5)), rng.choice([0, -0.3, 1, 2], size=3), rng.random((3, 5)) < 0.8
    expected, kept = np.zeros(5), np.ones(5, bool)
    for b in range(5):
        for k in range(3):
            kept[b] &= bool(mask[k, b]) or weights[k] == 0
        if kept[b]:
            expected[b] = sum(weights[k] * scores[k, b] for k in range(3) if mask[k, b])
    found = combine_scores(np.where(mask, scores, np.nan), weights, mask)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], kept)


def test_overlong_penalty_by_hand():
    # The figures of the paper: at most 20,480 tokens, of which the last 4,096 are the buffer.
    lengths = np.array([0, 16384, 17408, 18432, 20480, 30000])
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 4096), [0, 0, -0.25, -0.5, -1, -1])
    np.testing.assert_allclose(overlong_penalty(np.array([0, 5, 10]), 10, 10), [0, -0.5, -1])


def test_length_penalty_by_hand():
    np.testing.assert_allclose(length_penalty(np.array([0, 3, 10]), 0.1), [0, -0.3, -1], rtol=1e-6)
    np.testing.assert_allclose(length_penalty(np.array([0, 3, 10]), 0.1, free=4), [0, 0, -0.6], rtol=1e-6)
    np.testing.assert_allclose(length_penalty(np.array([0, 3, 10]), 0.0), [0, 0, 0])


def test_bad_scores_and_penalties_are_refused():
    with pytest.raises(ValueError, match=r"weights has shape \(3,\); \[K\] = \(2,\)"):
        combine_scores(np.zeros((2, 4)), np.ones(3))
    with pytest.raises(ValueError, match=r"scores has shape \(4,\); \[K, B\]"):
        combine_scores(np.zeros(4), np.ones(4))
    with pytest.raises(ValueError, match="the same shape"):
        combine_scores(np.zeros((2, 4)), np.ones(2), np.ones((1, 4)))
    with pytest.raises(ValueError, match="weights is nan"):
        combine_scores(np.zeros((2, 4)), np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="buffer is 0; a number above 0"):
        overlong_penalty(np.array([3]), 10, 0)
    with pytest.raises(ValueError, match="max_length - buffer is -1; at least 0"):
        overlong_penalty(np.array([3]), 10, 11)
    with pytest.raises(ValueError, match="length is -3; at least 0"):
        overlong_penalty(np.array([-3]), 10, 5)
    with pytest.raises(ValueError, match="coef is -0.1; at least 0"):
        length_penalty(np.array([3]), -0.1)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), clip=st.sampled_from([None, 0.5]))
def test_normalisation_and_penalties_equal_a_loop(seed, clip):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(3, 2, 6), rng.random(6) < 0.7
    own = [s for s, kept in zip(scores, mask, strict=True) if kept]
    mean = sum(own) / len(own) if own else 0
    deviation = np.sqrt(sum((s - mean) ** 2 for s in own) / len(own)) if len(own) > 1 else 1
    shift, scale = score_statistics(np.where(mask, scores, np.nan), mask)
    np.testing.assert_allclose([shift, scale], [mean, deviation], rtol=1e-4, atol=1e-5)
    normalised = [(s - mean) / deviation for s in scores]
    if clip is not None:
        normalised = [min(max(s, -clip), clip) for s in normalised]
    np.testing.assert_allclose(normalise_scores(scores, mean, deviation, clip), normalised, rtol=1e-4, atol=1e-5)
    lengths, most, buffer, free = rng.integers(0, 30, 6), 20, int(rng.integers(1, 21)), int(rng.integers(0, 10))
    overlong, linear = [], []
    for length in lengths:
        inside = most - buffer
        overlong.append(0 if length <= inside else -1 if length > most else (inside - length) / buffer)
        linear.append(-0.3 * (length - free) if length > free else 0)
    np.testing.assert_allclose(overlong_penalty(lengths, most, buffer), overlong, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(length_penalty(lengths, 0.3, free), linear, rtol=1e-5, atol=1e-6)


def test_the_gradients_of_shaped_rewards_are_finite_differences():
    with jax.enable_x64(True):
        ended = np.array([True, False])
        function = jax.jit(lambda scores, kl: shape_rewards(scores, kl, 0.1, LENGTHS, ended, "penalty", 0.75))
        check_grads(function, (SCORES, KL), order=1, modes=["rev"])
        check_grads(jax.jit(lambda scores: normalise_scores(scores, 0.3, 2.0, 0.5)), (SCORES,), order=1, modes=["rev"])
        assert function(SCORES, KL).dtype == np.float64


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_values_after_a_response_are_not_read(garbage):
    kl = KL.copy()
    kl[1, 2] = garbage
    ended = np.array([True, True])
    rewards, gradient = jax.jit(jax.value_and_grad(lambda x: shape_rewards(SCORES, x, 0.1, LENGTHS, ended).sum()))(kl)
    assert float(rewards) == pytest.approx(0.5 - 0.25 - 0.1 * (0.1 + 0.2 + 0.3 + 1 - 1), rel=1e-6)
    np.testing.assert_allclose(gradient, [[-0.1, -0.1, -0.1], [-0.1, -0.1, 0]], rtol=1e-6)
