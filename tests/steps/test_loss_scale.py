"""float16: the rule of the loss scale, which affects training only by rounding."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Optimizer
from jaxalign.data.packing import pack
from jaxalign.rl.checks import unexplained
from jaxalign.rl.update import ppo_update
from jaxalign.steps import loss_scale
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.loss_scale import LossScale
from jaxalign.steps.microbatch import Aux, accumulate, parts_of
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import abstract_state, init_state
from jaxalign.tracking.metrics import by_name
from tests import tiny
from tests.steps.made_experience import made_experience

HALF = "float16"
EPS = 2.0**-11  # the largest relative error of rounding to float16
SGD = optax.sgd(1.0)  # an update is the gradient
RNG = np.random.default_rng(0)
ROWS = pack([(RNG.integers(0, 32, n).tolist(), [1.0] * n) for n in (12, 9, 3, 11, 7, 10, 12, 5)], 12)[0]
ROWS = jax.tree.map(lambda x: np.pad(x, ((0, 8 - len(ROWS.tokens)), (0, 0))), ROWS)


def scale(value: float, steps: int = 0) -> LossScale:
    return LossScale(jnp.float32(value), jnp.int32(steps))


def start(mesh=None, dtype=HALF, optimizer=SGD, first: float | None = None):
    model = tiny.model(mesh, compute_dtype=dtype)
    state = init_state(model, optimizer, tiny.place(model, tiny.host_params()), jax.random.key(0))
    return model, state if first is None else dataclasses.replace(state, loss_scale=scale(first))


def largest(tree) -> float:
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def test_the_scale_follows_its_rule():
    """Halved by every non-finite step, down to 1; doubled by every 2000th finite step in a row, up to 2^24."""
    finite = np.concatenate([RNG.random(300) > 0.1, RNG.random(60) > 0.8, np.ones(60_000, bool), [False], np.ones(2001, bool)])
    want, value, steps = [], 2.0**15, 0
    for one in finite:
        if not one:
            value, steps = max(value / 2, 1.0), 0
        elif steps == 1999:
            value, steps = min(value * 2, 2.0**24), 0
        else:
            steps += 1
        want.append((value, steps))

    def step(now, one):
        now = now.after(one)
        return now, (now.scale, now.finite_steps)

    _, found = jax.lax.scan(step, loss_scale.first_scale(tiny.model(compute_dtype=HALF)), finite)
    np.testing.assert_array_equal(np.stack(found, 1), np.array(want))
    assert min(want)[0] == 1.0 and max(want)[0] == 2.0**24


def test_gradients_are_unscaled_and_small_ones_do_not_underflow():
    """The gradient of sum(float16(w) * x) is x. With the loss divided by 1e8, x / 1e8 is below the smallest float16."""
    x = np.array([[1.0, 2.0, -3.0, 0.5], [4.0, -5.0, 6.0, 1.5]], np.float16)

    def loss_fn(w, batch):
        loss = jnp.sum((w.astype(jnp.float16)[None] * batch).astype(jnp.float32)) / 1e8
        return loss, Aux({"loss": loss})

    w = jnp.ones(4)
    for micro_batches in (1, 2):
        (loss, aux), gradient = accumulate(loss_fn, w, parts_of(x, micro_batches), loss_scale=scale(2.0**20))
        assert float(loss) == float(aux.sums["loss"]) == pytest.approx(x.astype(float).sum() / 1e8, rel=1e-6)
        # One rounding for each product and one for their sum: 2^-11 of the summands.
        np.testing.assert_allclose(gradient, x.astype(float).sum(0) / 1e8, rtol=0, atol=2 * EPS * 10 / 1e8)
    _, lost = accumulate(loss_fn, w, parts_of(x, 1))
    assert not np.asarray(lost).any()


@pytest.mark.medium
def test_the_gradient_equals_that_of_float32():
    """About 20 roundings through two layers and back, each by at most 2^-11 of the largest numbers."""
    gradients = {}
    for dtype in ("float32", HALF):
        model, state = start(dtype=dtype)
        new, _ = lm_step(state, LmArguments(model=model, optimizer=SGD, batch=ROWS))
        gradients[dtype] = jax.tree.map(np.subtract, tiny.host_params(), tiny.to_host(new.params))
    for found, want in zip(jax.tree.leaves(gradients[HALF]), jax.tree.leaves(gradients["float32"]), strict=True):
        np.testing.assert_allclose(found, want, atol=20 * EPS * np.abs(want).max())
        assert np.abs(found - want).max() > 0


def test_an_overflow_halves_the_scale_and_skips_the_step_and_training_continues():
    model, state = start(first=2.0**24)
    before, rows = tiny.to_host(state.params), []
    for _ in range(30):
        state, metrics = lm_step(state, LmArguments(model=model, optimizer=SGD, batch=ROWS))
        rows.append({name: float(value) for name, value in by_name(metrics).items()})
        if all(row["skipped"] for row in rows):
            chex.assert_trees_all_equal(tiny.to_host(state.params), before)
    skipped = np.array([row["skipped"] for row in rows])
    assert skipped[0] == 1 and skipped[-10:].sum() == 0 and skipped.sum() < 12
    np.testing.assert_array_equal([row["loss_scale"] for row in rows], 2.0 ** (24 - (np.cumsum(skipped) - skipped)))
    assert int(state.loss_scale.finite_steps) == 29 - np.flatnonzero(skipped)[-1] and int(state.step) == 30
    assert np.isfinite([row["loss"] for row in rows]).all() and rows[-1]["loss"] < 0.9 * rows[0]["loss"]


def test_micro_batches_change_nothing_but_rounding():
    found = {}
    for number in (1, 4):
        model, state = start()
        new, metrics = lm_step(state, LmArguments(model=model, optimizer=SGD, micro_batches=number, batch=ROWS))
        found[number] = jax.tree.map(np.subtract, tiny.host_params(), tiny.to_host(new.params)), float(metrics.loss)
    (whole, loss), (parts, parts_loss) = found[1], found[4]
    assert parts_loss == pytest.approx(loss, rel=4 * EPS)
    # The embedding's sums over tokens are rounded to float16 within a micro-batch, and exact between micro-batches.
    chex.assert_trees_all_close(parts, whole, rtol=0, atol=8 * EPS * largest(whole))


@pytest.mark.slow
def test_training_on_a_mesh_equals_training_on_one_device():
    """Three steps that overflow by a wide margin, then five that do not. In between, a mesh may overflow a step earlier or
    later, because each device sums fewer rows in float16."""
    mesh, optimizer = (2, 2, 2), make_optimizer(Optimizer(learning_rate=1e-2, schedule="constant"), 20)
    states, rows = {}, {}
    for where in (None, mesh):
        model, state = start(where, optimizer=optimizer, first=2.0**24)
        for step in range(8):
            if step == 3:
                small = loss_scale.first_scale(model)
                small = small if where is None else jax.device_put(small, model.sharding.replicated)
                state = dataclasses.replace(state, loss_scale=small)
            state, metrics = lm_step(state, LmArguments(model=model, optimizer=optimizer, batch=tiny.rows(model, ROWS)))
            rows.setdefault(where, []).append([float(x) for x in (metrics.loss, metrics.loss_scale, metrics.skipped)])
        states[where] = state
    assert states[mesh].loss_scale.scale.sharding.is_fully_replicated
    chex.assert_trees_all_equal(tiny.to_host(states[mesh].loss_scale), tiny.to_host(states[None].loss_scale))
    np.testing.assert_array_equal(np.array(rows[mesh])[:, 1:], np.array(rows[None])[:, 1:])
    np.testing.assert_allclose(np.array(rows[mesh])[:, 0], np.array(rows[None])[:, 0], rtol=20 * EPS)


def test_a_resumed_run_keeps_its_scale(tmp_path):
    model, state = start()
    state = dataclasses.replace(state, loss_scale=scale(64.0, 1234))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, state)
    checkpointer.close()
    for mesh in (None, (2, 2, 2)):
        checkpointer = Checkpointer(tmp_path)
        _, found = checkpointer.restore(abstract_state(tiny.model(mesh, compute_dtype=HALF), SGD))
        checkpointer.close()
        assert (float(found.loss_scale.scale), int(found.loss_scale.finite_steps)) == (64.0, 1234)
        chex.assert_trees_all_equal(tiny.to_host(found), tiny.to_host(state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_have_no_scale_and_their_old_checkpoints_are_read(tmp_path, dtype):
    """A checkpoint in the format from before the loss scale existed: four parts."""
    model, state = start(dtype=dtype)
    old = {name: getattr(state, name) for name in ("step", "key", "params", "opt_state")}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, old)
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path)
    _, found = checkpointer.restore(abstract_state(model, SGD))
    checkpointer.close()
    assert found.loss_scale is None
    chex.assert_trees_all_equal(tiny.to_host(found), tiny.to_host(state))
    assert {path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(state)} <= set(old)
    _, metrics = jax.eval_shape(lm_step, state, LmArguments(model=model, optimizer=SGD, batch=ROWS))
    assert metrics.loss_scale is None and metrics.overflowed is None


@pytest.mark.slow
def test_a_tiny_model_learns_as_well_as_in_float32():
    last = {}
    for dtype in ("float32", HALF):
        model, state = start(dtype=dtype)
        for _ in range(6):
            state, metrics = lm_step(state, LmArguments(model=model, optimizer=SGD, batch=ROWS))
        last[dtype] = float(metrics.loss)
        assert last[dtype] < 2.5  # falls from log 32 = 3.5 or more
    assert last[HALF] == pytest.approx(last["float32"], rel=0.03)


@pytest.mark.slow
def test_policy_and_critic_have_separate_scales():
    setup = tiny.setup(compute_dtype=HALF)
    state = tiny.state(setup)
    state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, loss_scale=scale(4.0)))
    state, metrics = ppo_update(setup, state, made_experience())
    assert float(metrics.loss_scale) == 2.0**15 and float(metrics.critic_loss_scale) == 4.0
    assert float(metrics.skipped) == float(metrics.overflowed) == 0
    assert int(state.policy.loss_scale.finite_steps) == int(state.critic.loss_scale.finite_steps) == 4


def test_the_scale_explains_an_overflow_but_not_a_non_finite_loss():
    """The count that the run-time check of RL reports."""
    model, state = start(first=2.0**24)
    _, metrics = lm_step(state, LmArguments(model=model, optimizer=SGD, batch=ROWS))
    assert float(metrics.skipped) == 1 and float(unexplained(metrics)) == 0
    for spoilt, first in ((np.nan, 2.0**15), (np.nan, 1.0)):
        model, state = start(first=first)
        bad = dataclasses.replace(ROWS, loss_mask=np.where(ROWS.loss_mask > 0, spoilt, 0).astype(np.float32))
        state, metrics = lm_step(state, LmArguments(model=model, optimizer=SGD, batch=bad))
        assert float(unexplained(metrics)) == 1
        assert float(state.loss_scale.scale) == max(first / 2, 1.0)
    floor = scale(1.0)
    assert not floor.explains(jnp.float32(2.0)) and scale(2.0).explains(jnp.float32(2.0))
