"""AI labels by hand: normalised options, both orders, clamp, inversion, undecided, and direct scores."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms import labels


def test_the_two_options_are_normalised():
    # P(A) = .03 and P(B) = .01 over all tokens: three to one.
    label = labels.option_label(np.log([0.03, 0.01, 0.2]), np.log([0.01, 0.03, 0.2]))
    np.testing.assert_allclose(label, [0.75, 0.25, 0.5], rtol=1e-6)


def test_impossible_options():
    infinite = -np.inf
    label = labels.option_label(np.array([infinite, -1.0, infinite]), np.array([-1.0, infinite, infinite]))
    np.testing.assert_array_equal(label, [0, 1, 0.5])


def test_a_tie_counts_one_half_for_each_option():
    # 0.3, 0.1 and a tie of 0.4: (0.3 + 0.2) / 0.8 and 0.4 / 0.8.
    logprobs = np.log([0.3, 0.1, 0.4])
    np.testing.assert_allclose(labels.option_label(*logprobs), 0.625, rtol=1e-6)
    np.testing.assert_allclose(labels.tie_share(*logprobs), 0.5, rtol=1e-6)
    impossible = (-np.inf, -np.inf)
    assert (labels.option_label(*impossible, 0.0), labels.tie_share(*impossible, 0.0)) == (0.5, 1.0)
    assert (labels.option_label(*impossible, -np.inf), labels.tie_share(*impossible, -np.inf)) == (0.5, 1.0)
    assert labels.option_label(0.0, -np.inf, -np.inf) == 1.0


def test_both_orders_are_averaged():
    # A judge that prefers the first answer gives A .9 if A is first and .1 if B is first.
    np.testing.assert_allclose(labels.average_orders(np.array([0.9, 0.8]), np.array([0.1, 0.6])), [0.5, 0.7], rtol=1e-6)


def test_the_clamp_gives_the_worked_figures():
    clamped = labels.clamp_label(np.array([0.0, 0.39, 0.5, 0.55, 1.0]), 0.4, 0.6)
    np.testing.assert_allclose(clamped, [0.4, 0.4, 0.5, 0.55, 0.6], rtol=1e-6)


def test_inversion():
    np.testing.assert_allclose(labels.invert_label(np.array([0.0, 0.3, 1.0])), [1, 0.7, 0], rtol=1e-6)


def test_undecided_is_symmetric_and_includes_its_edges():
    at_margin = labels.is_undecided(np.array([0.39, 0.4, 0.5, 0.6, 0.61]), 0.1)
    np.testing.assert_array_equal(at_margin, [False, True, True, True, False])
    np.testing.assert_array_equal(labels.is_undecided(np.array([0.499, 0.5, 0.501]), 0.0), [False, True, False])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_exchanging_the_responses_mirrors_label_and_decision(seed):
    ab, ba = np.random.default_rng(seed).random((2, 6))
    label = labels.average_orders(ab, ba)
    # P(A) with A first becomes P(not A) with A second.
    mirrored = labels.average_orders(1 - ba, 1 - ab)
    np.testing.assert_allclose(mirrored, labels.invert_label(label), atol=1e-6)
    np.testing.assert_allclose(
        labels.clamp_label(mirrored, 0.4, 0.6), labels.invert_label(labels.clamp_label(label, 0.4, 0.6)), atol=1e-6
    )
    np.testing.assert_array_equal(labels.is_undecided(label, 0.25), labels.is_undecided(mirrored, 0.25))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_expected_scores_equal_a_loop(seed):
    logits = np.random.default_rng(seed).normal(0, 3, (4, 10))
    expected = []
    for row in logits:
        weights = [np.exp(x) for x in row]
        expected.append(sum(i * w for i, w in enumerate(weights, start=1)) / sum(weights))
    np.testing.assert_allclose(labels.expected_score(logits), expected, rtol=1e-5)


def test_direct_rewards_by_hand():
    # Half on 10 and half on 1: 5.5, the middle. All on 10: 1.
    halves = np.log(np.array([0.5, *[1e-30] * 8, 0.5]))
    assert float(labels.expected_score(halves)) == pytest.approx(5.5, rel=1e-6)
    np.testing.assert_allclose(labels.direct_reward(np.array([1, 5.5, 10])), [-1, 0, 1])


def test_a_judge_without_an_answer_has_no_score():
    assert np.isnan(float(labels.expected_score(np.full(10, -np.inf))))


def test_python_floats_of_a_single_pair_are_accepted():
    # The labeller processes single pairs as Python floats.
    label = labels.average_orders(0.9, 0.7)
    assert float(labels.invert_label(label)) == pytest.approx(0.2, rel=1e-6)
    assert not bool(labels.is_undecided(label, 0.02))
    assert float(labels.clamp_label(label, 0.4, 0.6)) == pytest.approx(0.6, rel=1e-6)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"low is 0.7; in \[0, 0.5\]"):
        labels.clamp_label(np.array([0.5]), 0.7, 0.9)
    with pytest.raises(ValueError, match=r"label_ba is 1.2; in \[0, 1\]"):
        labels.average_orders(np.array([0.5]), np.array([1.2]))
    with pytest.raises(ValueError, match=r"margin is 0.6; in \[0, 0.5\]"):
        labels.is_undecided(np.array([0.5]), 0.6)
    with pytest.raises(ValueError, match=r"logprobs has shape \(9,\)"):
        labels.expected_score(np.zeros(9))
    with pytest.raises(ValueError, match=r"score is 11; in \[1, 10\]"):
        labels.direct_reward(11)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_labels_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(-3, 2, (2, 6))
    expected = [np.exp(x) / (np.exp(x) + np.exp(y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(labels.option_label(a, b), expected, rtol=1e-5)
    ab, ba = rng.random((2, 6))
    averaged = labels.average_orders(ab, ba)
    for i in range(6):
        mean = (ab[i] + ba[i]) / 2
        assert float(averaged[i]) == pytest.approx(mean, rel=1e-6)
        assert float(labels.clamp_label(averaged, 0.4, 0.6)[i]) == pytest.approx(min(max(mean, 0.4), 0.6), rel=1e-6)
        assert bool(labels.is_undecided(averaged, 0.2)[i]) == (abs(mean - 0.5) <= 0.2)
        assert float(labels.invert_label(averaged)[i]) == pytest.approx(1 - mean, rel=1e-5)
        assert float(labels.direct_reward(1 + 9 * ab)[i]) == pytest.approx(2 * ab[i] - 1, abs=1e-5)


def test_the_gradients_of_labels_are_finite_differences():
    with jax.enable_x64(True):
        a, b = np.array([-0.5, -2.0, -1.0]), np.array([-1.0, -0.3, -1.1])
        check_grads(jax.jit(labels.option_label), (a, b), order=1, modes=["rev"])
        check_grads(jax.jit(labels.expected_score), (np.random.default_rng(0).normal(size=(2, 10)),), order=1, modes=["rev"])
        assert labels.option_label(a, b).dtype == np.float64


def test_labels_outside_their_range_are_refused():
    for wrong in (-0.1, 1.1, np.nan):
        for function in (
            labels.invert_label,
            lambda x: labels.clamp_label(x, 0.4, 0.6),
            lambda x: labels.is_undecided(x, 0.1),
            lambda x: labels.average_orders(x, np.array([0.5])),
        ):
            with pytest.raises(ValueError, match=r"in \[0, 1\] is expected"):
                function(np.array([wrong]))
    with pytest.raises(ValueError, match="the same shape"):
        labels.option_label(np.zeros(3), np.zeros(1))
