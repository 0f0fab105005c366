"""The Bradley-Terry loss and the regression on scores: by hand, in their limits, against a loop and by finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.preference_losses import bradley_terry, score_regression


def test_by_hand():
    # Margins 0, log 3, log 3: sigmoids 1/2, 3/4, 3/4. Labels: a hard 1, a hard 0, and an even one.
    score_a, score_b = np.array([2.0, np.log(3), np.log(3), 0.0]), np.array([2.0, 0.0, 0.0, np.log(3)])
    loss = bradley_terry(score_a, score_b, np.array([0.3, 1.0, 0.0, 0.5]))
    expected = [np.log(2), np.log(4 / 3), np.log(4), (np.log(4) + np.log(4 / 3)) / 2]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_margins_give_the_published_figures():
    # Margins 0, 1, 2 with hard labels, as in DPO with beta .1 and raw margins 0, 10, 20.
    loss = bradley_terry(np.array([0.0, 1.0, 2.0]), np.zeros(3), np.ones(3))
    np.testing.assert_allclose(loss, [0.693147, 0.313262, 0.126928], atol=5e-7)
    smoothed = bradley_terry(np.array([0.0, 1.0, 2.0]), np.zeros(3), np.full(3, 0.9))
    np.testing.assert_allclose(smoothed, [0.693147, 0.413262, 0.326928], atol=5e-7)


def test_centering_by_hand():
    loss = bradley_terry(np.array([1.0]), np.array([1.0]), np.array([0.5]), centering_coef=0.01)
    np.testing.assert_allclose(loss, [np.log(2) + 0.04], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), coef=st.sampled_from([0.0, 0.01, 0.5]))
def test_equals_a_loop_and_swapping_the_pair_changes_nothing(seed, coef):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, 2, (2, 5))
    label = rng.random(5)
    expected = []
    for x, y, p in zip(a, b, label, strict=True):
        first = np.exp(x) / (np.exp(x) + np.exp(y))
        expected.append(-p * np.log(first) - (1 - p) * np.log(1 - first) + coef * (x + y) ** 2)
    np.testing.assert_allclose(bradley_terry(a, b, label, coef), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(bradley_terry(b, a, 1 - label, coef), expected, rtol=2e-5, atol=1e-6)


def test_the_loss_is_minimal_where_the_model_agrees_with_the_label():
    # d loss / d margin = sigmoid(margin) - label.
    margin = jnp.log(jnp.array([0.7 / 0.3]))
    gradient = jax.grad(lambda a: bradley_terry(a, jnp.zeros(1), np.array([0.7])).sum())(margin)
    np.testing.assert_allclose(gradient, [0], atol=1e-7)


def test_large_margins_stay_finite():
    loss = bradley_terry(np.array([500.0, -500.0]), np.array([-500.0, 500.0]), np.array([1.0, 1.0]))
    np.testing.assert_allclose(loss, [0, 1000])


def test_the_gradient_is_the_finite_difference():
    with jax.enable_x64(True):
        a, b, label = np.array([0.3, -2.0, 5.0]), np.array([0.1, 1.0, -1.0]), np.array([0.0, 0.4, 1.0])
        check_grads(lambda a, b: bradley_terry(a, b, label, 0.01), (a, b), order=1, modes=["rev"])


def test_labels_that_are_not_probabilities_are_refused():
    # Labels of -1 and 1 are another convention; here they would silently train a wrong model.
    with pytest.raises(ValueError, match=r"label is -1.0; in \[0, 1\]"):
        bradley_terry(np.zeros(2), np.zeros(2), np.array([1.0, -1.0]))
    # At trace time as well, if the label is known.
    with pytest.raises(ValueError, match="label is 2.0"):
        jax.eval_shape(lambda a: bradley_terry(a, a, np.array([2.0, 1.0])), np.zeros(2))
    with pytest.raises(ValueError, match="centering_coef is -0.1"):
        bradley_terry(np.zeros(1), np.zeros(1), np.ones(1), -0.1)


def test_a_margin_by_hand():
    # A score difference of log 3 minus a margin of log 3 is 0, and reversed -2 log 3: sigmoids 1/2 and 1/10.
    a, b = np.full(3, np.log(3)), np.zeros(3)
    loss = bradley_terry(a, b, np.array([1.0, 0.0, 0.5]), margin=np.full(3, np.log(3)))
    np.testing.assert_allclose(loss, [np.log(2), np.log(10), np.log(20) / 2], rtol=1e-6)
    np.testing.assert_allclose(bradley_terry(a, b, np.array([1.0, 0.0, 0.5]), margin=np.log(3)), loss)
    # One margin per pair; 0 equals no margin.
    mixed = bradley_terry(a, b, np.ones(3), margin=np.array([0.0, np.log(3), 0.0]))
    np.testing.assert_allclose(mixed, [np.log(4 / 3), np.log(2), np.log(4 / 3)], rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_margin_under_a_mask_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, 2, (2, 6))
    label, margin, mask = rng.random(6), rng.gamma(1.0, 1.0, 6), rng.random(6) < 0.6
    expected = np.zeros(6)
    for i in np.flatnonzero(mask):
        x, y = np.exp(-(a[i] - b[i] - margin[i])), np.exp(-(b[i] - a[i] - margin[i]))
        expected[i] = label[i] * np.log(1 + x) + (1 - label[i]) * np.log(1 + y) + 0.1 * (a[i] + b[i]) ** 2
    spoilt = (np.where(mask, x, np.nan) for x in (a, b, label))
    loss = bradley_terry(*spoilt, 0.1, np.where(mask, margin, -1), mask)
    np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_padding_has_no_loss_and_no_gradient(garbage):
    scores, mask = jnp.array([garbage, 0.3, -1.0, garbage]), np.array([0, 1, 1, 0])
    label, other = np.array([garbage, 1.0, 0.5, garbage]), np.array([garbage, 0.0, 0.0, garbage])
    alone = bradley_terry(scores[1:3], other[1:3], label[1:3], 0.1, 0.5)
    np.testing.assert_allclose(bradley_terry(scores, other, label, 0.1, 0.5, mask), [0, *alone, 0], rtol=1e-6)
    np.testing.assert_array_equal(bradley_terry(scores, other, label, 0.1, 0.5, np.zeros(4)), np.zeros(4))
    for function in (
        lambda x: bradley_terry(x, other, label, 0.1, 0.5, mask),
        lambda x: score_regression(x, other, mask),
        lambda x: score_regression(x, other, mask, 0.7),
    ):
        gradient = jax.jit(jax.grad(lambda x, f=function: f(x).sum()))(scores)
        assert np.isfinite(gradient).all() and gradient[1] != 0
        np.testing.assert_array_equal(gradient[jnp.array([0, 3])], [0, 0])


def test_regression_by_hand():
    # Errors .5, -2, 1. Huber's loss with delta 1: .125, 2 - .5, .5; with delta 1/2: .125, .5 (2 - .25), .5 (1 - .25).
    scores, targets = np.array([0.5, -1.0, 2.0]), np.array([0, 1, 1])
    np.testing.assert_allclose(score_regression(scores, targets), [0.25, 4, 1])
    np.testing.assert_allclose(score_regression(scores, targets, huber_delta=1.0), [0.125, 1.5, 0.5])
    np.testing.assert_allclose(score_regression(scores, targets, huber_delta=0.5), [0.125, 0.875, 0.375])
    np.testing.assert_allclose(score_regression(scores, targets, np.array([1, 0, 1])), [0.25, 0, 1])
    np.testing.assert_array_equal(score_regression(scores, np.full(3, np.nan), np.zeros(3)), np.zeros(3))
    gradient = jax.grad(lambda x: score_regression(x, targets, huber_delta=0.5).sum())(jnp.asarray(scores))
    np.testing.assert_allclose(gradient, [0.5, -0.5, 0.5])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), delta=st.sampled_from([None, 0.3, 1.0]))
def test_regression_equals_a_loop(seed, delta):
    scores, targets = np.random.default_rng(seed).normal(size=(2, 7))
    expected = []
    for x, y in zip(scores, targets, strict=True):
        error = abs(x - y)
        if delta is None:
            expected.append(error**2)
        else:
            expected.append(0.5 * error**2 if error <= delta else delta * (error - 0.5 * delta))
    np.testing.assert_allclose(score_regression(scores, targets, None, delta), expected, rtol=1e-5, atol=1e-6)


def test_the_gradients_with_a_margin_and_of_regression_are_finite_differences():
    with jax.enable_x64(True):
        a, b, label = np.array([0.3, -2.0, 5.0]), np.array([0.1, 1.0, -1.0]), np.array([0.0, 0.4, 1.0])
        margin = np.array([0.5, 0.0, 2.0])
        check_grads(lambda a, b: bradley_terry(a, b, label, 0.01, margin), (a, b), order=1, modes=["rev"])
        check_grads(lambda a: score_regression(a, b), (a,), order=1, modes=["rev"])
        check_grads(lambda a: score_regression(a, b, None, 0.7), (a,), order=1, modes=["rev"])
        assert score_regression(a, b).dtype == np.float64
    no_gradient = jax.grad(lambda target: score_regression(jnp.ones(2), target).sum())(jnp.zeros(2))
    np.testing.assert_array_equal(no_gradient, [0, 0])


def test_bad_margins_masks_and_targets_are_refused():
    with pytest.raises(ValueError, match="margin is -0.5; at least 0"):
        bradley_terry(np.zeros(1), np.zeros(1), np.ones(1), margin=-0.5)
    with pytest.raises(ValueError, match=r"the same shape: score_a \(2,\), margin \(1,\)"):
        bradley_terry(np.zeros(2), np.zeros(2), np.ones(2), margin=np.ones(1))
    with pytest.raises(ValueError, match=r"the same shape: .*mask \(1,\)"):
        bradley_terry(np.zeros(2), np.zeros(2), np.ones(2), mask=np.ones(1))
    with pytest.raises(ValueError, match="the same shape"):
        score_regression(np.zeros(2), np.zeros((2, 1)))
    with pytest.raises(ValueError, match="huber_delta is 0.0; a number above 0"):
        score_regression(np.zeros(2), np.zeros(2), huber_delta=0.0)
