"""Schedules, both forms of Adam, decay and clipping, by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Optimizer
from jaxalign.training.optimizer import make_optimizer, make_schedule
from tests import tiny


def rates(total, **fields):
    schedule = make_schedule(Optimizer(**fields), total)
    return [float(schedule(step)) for step in range(total)]


def test_constant_rate():
    np.testing.assert_allclose(rates(4, learning_rate=0.5, schedule="constant"), [0.5] * 4)


def test_linear_rate_goes_to_0_at_the_end():
    np.testing.assert_allclose(rates(4, learning_rate=1.0, schedule="linear"), [1, 0.75, 0.5, 0.25])


def test_cosine_rate_goes_to_0_at_the_end():
    expected = [0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    np.testing.assert_allclose(rates(5, learning_rate=1.0, schedule="cosine"), expected, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_on_a_line_and_wastes_no_step(schedule):
    """4 steps of 10 from a quarter of the rate: .25, .4375, .625, .8125, and the whole rate at step 4."""
    found = rates(10, learning_rate=2.0, schedule=schedule, warmup_steps=4)
    np.testing.assert_allclose(found[:5], [0.5, 0.875, 1.25, 1.625, 2.0], rtol=1e-6)
    after = {"constant": 1.0, "linear": 1 - 3 / 6, "cosine": 0.5 * (1 + math.cos(math.pi * 3 / 6))}[schedule]
    assert found[7] == pytest.approx(2.0 * after, rel=1e-6)


def descend(config, gradients, start):
    optimizer = make_optimizer(config, len(gradients))
    params = {"blocks": {"w": jnp.asarray(start)[None]}}
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update({"blocks": {"w": jnp.asarray(gradient)[None]}}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["blocks"]["w"][0])


GRADIENTS = np.array([[0.1, -2.0, 1e-6], [0.3, 1.0, 2e-6], [-0.2, 0.5, -1e-6]], np.float32)


def adam(eps_inside, eps=1e-5, rate=0.1, b1=0.9, b2=0.95):
    """Three steps in float64. Kingma and Ba's form against TensorFlow's, whose eps meets the uncorrected root."""
    x, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(GRADIENTS.astype(np.float64), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        if eps_inside:
            x = x - rate * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
        else:
            x = x - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return x


@pytest.mark.parametrize("eps_inside", [False, True])
def test_adam_by_hand(eps_inside):
    config = Optimizer(learning_rate=0.1, schedule="constant", eps=1e-5, eps_inside=eps_inside, clip_norm=None)
    np.testing.assert_allclose(descend(config, GRADIENTS, np.ones(3, np.float32)), adam(eps_inside), rtol=1e-5)


def test_tensorflows_form_moves_less_where_gradients_are_tiny():
    usual, inside = (1 - adam(form)[2] for form in (False, True))
    assert 0 < inside < 0.5 * usual


def test_gradients_are_clipped_by_their_global_norm():
    """Norm 5 to 1, before Adam: its moments see 0.6 and 0.8. None leaves them alone."""
    gradient = {"blocks": {"a": jnp.array([[3.0]])}, "b": jnp.array([4.0])}
    params = jax.tree.map(jnp.zeros_like, gradient)

    def first_moment(clip):
        optimizer = make_optimizer(Optimizer(clip_norm=clip), 10)
        _, state = optimizer.update(gradient, optimizer.init(params), params)
        return optax.tree_utils.tree_get(state, "mu")

    np.testing.assert_allclose(first_moment(1.0)["blocks"]["a"], [[0.06]], rtol=1e-6)
    np.testing.assert_allclose(first_moment(1.0)["b"], [0.08], rtol=1e-6)
    np.testing.assert_allclose(first_moment(None)["b"], [0.4], rtol=1e-6)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_weight_decay_is_on_matrices_alone(head):
    """With gradients of 0 a step of rate .1 and decay .2 takes 2% off every matrix; norms and the scalar head stay."""
    params = tiny.host_params(head)
    optimizer = make_optimizer(Optimizer(learning_rate=0.1, schedule="constant", weight_decay=0.2), 10)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name, leaf = jax.tree_util.keystr(path), params
        for part in path:
            leaf = leaf[part.key]
        vector = "norm" in name or "score" in name
        np.testing.assert_allclose(update, np.zeros_like(leaf) if vector else -0.02 * leaf, rtol=1e-5, err_msg=name)


def test_a_rate_of_0_keeps_the_weights():
    config = Optimizer(learning_rate=0.0, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    np.testing.assert_array_equal(descend(config, GRADIENTS, np.ones(3, np.float32)), np.ones(3))
