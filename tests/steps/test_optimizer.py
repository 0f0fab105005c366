"""Schedules, both forms of Adam, decay and clipping, by hand."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxalign.config import Optimizer
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.optimizer import make_optimizer, make_schedule
from jaxalign.steps.state import apply_gradients, init_state
from tests import tiny
from tests.steps.batches import ROWS


def rates(total, **fields):
    schedule = make_schedule(Optimizer(**fields), total)
    return [float(schedule(step)) for step in range(total)]


def test_constant_rate():
    np.testing.assert_allclose(rates(4, learning_rate=0.5, schedule="constant"), [0.5] * 4)


def test_linear_rate_ends_at_0():
    np.testing.assert_allclose(rates(4, learning_rate=1.0, schedule="linear"), [1, 0.75, 0.5, 0.25])


def test_cosine_rate_ends_at_0():
    expected = [0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    np.testing.assert_allclose(rates(5, learning_rate=1.0, schedule="cosine"), expected, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_no_step_has_rate_0(schedule):
    """In 4 of 10 steps from a quarter of the rate: .25, .4375, .625, .8125, then the whole rate at step 4."""
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
    """Three steps in float64: Kingma and Ba's form, or TensorFlow's, which adds eps to the uncorrected root."""
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


def test_tensorflows_form_takes_smaller_steps_for_tiny_gradients():
    usual, inside = (1 - adam(form)[2] for form in (False, True))
    assert 0 < inside < 0.5 * usual


def test_gradients_are_clipped_by_their_global_norm():
    """A norm of 5 is clipped to 1 before Adam: its moments see 0.6 and 0.8. None disables clipping."""
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
def test_weight_decay_applies_to_matrices_only(head):
    """With zero gradients, a step of rate .1 and decay .2 takes 2% off every matrix; norms and the scalar head do not
    change."""
    params = tiny.host_params(head)
    optimizer = make_optimizer(Optimizer(learning_rate=0.1, schedule="constant", weight_decay=0.2), 10)
    zeros = jax.tree.map(np.zeros_like, params)
    updates = jax.jit(lambda gradients: optimizer.update(gradients, optimizer.init(params), params)[0])(zeros)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name, leaf = jax.tree_util.keystr(path), params
        for part in path:
            leaf = leaf[part.key]
        vector = "norm" in name or "score" in name
        np.testing.assert_allclose(update, np.zeros_like(leaf) if vector else -0.02 * leaf, rtol=1e-5, err_msg=name)


def test_a_rate_of_0_leaves_the_weights_unchanged():
    config = Optimizer(learning_rate=0.0, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    np.testing.assert_array_equal(descend(config, GRADIENTS, np.ones(3, np.float32)), np.ones(3))


UP = np.array([[[0.5, -1.0, 0.2], [2.0, 0.1, -0.3]], [[1.0, 0.4, -2.0], [0.3, 0.6, 0.9]]], np.float32)
TWO = {"blocks": {"mlp": {"up": UP}}, "embedding": np.array([[0.3, -0.7], [1.1, 0.2], [0.4, -0.5]], np.float32)}


def one_by_one(optimizer, steps):
    """Train the same weights as a flat tree of separate layers, for `steps` steps with the weights as gradients."""
    params = {"0": UP[0], "1": UP[1], "embedding": TWO["embedding"]}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return params


def stacked(config, steps):
    optimizer, params = make_optimizer(config, steps), TWO
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return {"0": params["blocks"]["mlp"]["up"][0], "1": params["blocks"]["mlp"]["up"][1], "embedding": params["embedding"]}


SETTINGS = {"learning_rate": 0.1, "schedule": "constant", "clip_norm": None}


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("lion", optax.lion(0.1, 0.9, 0.95, weight_decay=0.0)),
        ("adafactor", optax.adafactor(0.1, min_dim_size_to_factor=128)),
        # Tables use plain Adam.
        ("muon", optax.partition(
            {"kernel": optax.contrib.muon(0.1, beta=0.9, consistent_rms=0.2), "table": optax.adam(0.1, 0.9, 0.95)},
            {"0": "kernel", "1": "kernel", "embedding": "table"},
        )),
    ],
)
def test_stacked_layers_are_updated_as_optax_updates_separate_layers(kind, theirs):
    chex.assert_trees_all_close(stacked(Optimizer(kind=kind, **SETTINGS), 3), one_by_one(theirs, 3), rtol=1e-5, atol=1e-6)


def test_a_large_matrix_has_a_factored_moment():
    """For [2, 256, 512] Adafactor stores 256 + 512 numbers per layer, not their product."""
    shapes = {"blocks": {"mlp": {"up": jax.ShapeDtypeStruct((2, 256, 512), jnp.float32)}}}
    state = jax.eval_shape(make_optimizer(Optimizer(kind="adafactor"), 10).init, shapes)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 2 * (256 + 512) + 10


@pytest.mark.parametrize(("kind", "numbers"), [("adamw", 2), ("lion", 1), ("muon", 1), ("adafactor", 0)])
def test_bytes_of_optimizer_state_per_parameter_of_a_large_kernel(kind, numbers):
    """The figures of docs/memory.md: 8, 4, 4 and nearly 0 bytes per parameter."""
    shapes = {"blocks": {"mlp": {"up": jax.ShapeDtypeStruct((2, 512, 1024), jnp.float32)}}}
    state = jax.eval_shape(make_optimizer(Optimizer(kind=kind), 10).init, shapes)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) / (2 * 512 * 1024) == pytest.approx(numbers, abs=0.004)


@pytest.mark.parametrize("kind", ["lion", "adafactor", "muon"])
def test_every_optimizer_gives_the_same_updates_on_a_mesh_as_on_one_device(kind):
    found = []
    for mesh in (None, (2, 2, 2)):
        model, optimizer = tiny.model(mesh), make_optimizer(Optimizer(kind=kind, learning_rate=1e-2, weight_decay=0.1), 10)
        state = init_state(model, optimizer, tiny.place(model, tiny.host_params()), jax.random.key(0))
        state, _ = jax.jit(apply_gradients, static_argnums=(0, 3))(model, state, state.params, optimizer, jnp.float32(1))
        found.append(tiny.to_host(state.params))
    chex.assert_trees_all_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_sophia_by_hand():
    """The curvature of a loss sum(h x^2) / 2 has the diagonal h, and Hutchinson's estimate is exact: x falls by the rate times
    m / max(0.01 e, eps), clipped to 1, where e is the average of h over updates 0, 10, 20 ..."""
    curvature = np.array([4.0, 100.0, 1e4])
    optimizer = make_optimizer(Optimizer(kind="sophia", learning_rate=0.01, schedule="constant", clip_norm=None), 20)

    def loss(params):
        return jnp.sum(jnp.asarray(curvature, jnp.float32) * params["x"] ** 2) / 2

    params = {"x": jnp.asarray([1.0, -0.5, 0.02], jnp.float32)}
    state, x, m, e = optimizer.init(params), np.array([1.0, -0.5, 0.02]), np.zeros(3), np.zeros(3)
    for step in range(12):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params, obj_fn=loss)
        params = optax.apply_updates(params, updates)
        m = 0.9 * m + 0.1 * curvature * x
        x = x - 0.01 * np.clip(m / (1 - 0.9 ** (step + 1)) / np.maximum(0.01 * e, 1e-8), -1, 1)
        e = 0.95 * e + 0.05 * curvature if step % 10 == 0 else e
    np.testing.assert_allclose(params["x"], x, rtol=1e-4)


@pytest.mark.slow
def test_sophia_gives_the_same_updates_on_a_mesh_as_on_one_device():
    found = []
    for mesh in (None, (2, 2, 2)):
        model, optimizer = tiny.model(mesh), make_optimizer(Optimizer(kind="sophia", learning_rate=1e-3), 10)
        state = init_state(model, optimizer, tiny.place(model, tiny.host_params()), jax.random.key(0))
        for _ in range(2):
            given = LmArguments(model=model, optimizer=optimizer, micro_batches=2, batch=tiny.rows(model, ROWS))
            state, metrics = lm_step(state, given)
        found.append(tiny.to_host((state.params, metrics)))
    chex.assert_trees_all_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)
    # An update is clipped to the rate, with the sign of a gradient that may be only rounding: few updates may differ.
    ours, theirs = (np.concatenate([x.ravel() for x in jax.tree.leaves(params)]) for params, _ in found)
    assert np.mean(np.abs(ours - theirs) > 1e-5) < 0.01
