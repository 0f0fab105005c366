"""The Bradley-Terry loss by hand, in its limits, and by finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.preference_losses import bradley_terry


def test_by_hand():
    # Margins 0, log 3, log 3: sigmoids 1/2, 3/4, 3/4. Hard label 1, hard label 0, and an even one.
    score_a, score_b = np.array([2.0, np.log(3), np.log(3), 0.0]), np.array([2.0, 0.0, 0.0, np.log(3)])
    loss = bradley_terry(score_a, score_b, np.array([0.3, 1.0, 0.0, 0.5]))
    expected = [np.log(2), np.log(4 / 3), np.log(4), (np.log(4) + np.log(4 / 3)) / 2]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_margins_give_the_published_figures():
    # Margins 0, 1, 2 under hard labels, as in DPO with beta .1 and raw margins 0, 10, 20.
    loss = bradley_terry(np.array([0.0, 1.0, 2.0]), np.zeros(3), np.ones(3))
    np.testing.assert_allclose(loss, [0.693147, 0.313262, 0.126928], atol=5e-7)
    smoothed = bradley_terry(np.array([0.0, 1.0, 2.0]), np.zeros(3), np.full(3, 0.9))
    np.testing.assert_allclose(smoothed, [0.693147, 0.413262, 0.326928], atol=5e-7)


def test_centering_by_hand():
    loss = bradley_terry(np.array([1.0]), np.array([1.0]), np.array([0.5]), centering_coef=0.01)
    np.testing.assert_allclose(loss, [np.log(2) + 0.04], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), coef=st.sampled_from([0.0, 0.01, 0.5]))
def test_equals_a_loop_and_turning_the_pair_round_changes_nothing(seed, coef):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, 2, (2, 5))
    label = rng.random(5)
    expected = []
    for x, y, p in zip(a, b, label, strict=True):
        first = np.exp(x) / (np.exp(x) + np.exp(y))
        expected.append(-p * np.log(first) - (1 - p) * np.log(1 - first) + coef * (x + y) ** 2)
    np.testing.assert_allclose(bradley_terry(a, b, label, coef), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(bradley_terry(b, a, 1 - label, coef), expected, rtol=2e-5, atol=1e-6)


def test_the_minimum_is_where_the_model_agrees_with_the_label():
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


def test_labels_that_are_no_probabilities_are_refused():
    # -1 and 1 for the two outcomes is another convention; under this one it would train in silence.
    with pytest.raises(ValueError, match=r"label is -1.0; in \[0, 1\]"):
        bradley_terry(np.zeros(2), np.zeros(2), np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="centering_coef is -0.1"):
        bradley_terry(np.zeros(1), np.zeros(1), np.ones(1), -0.1)
