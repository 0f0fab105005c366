"""Micro-batches save memory and change nothing else."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.steps.loss_scale import LossScale
from jaxalign.steps.microbatch import Aux, Parts, accumulate, chosen, parts_of, split
from tests import tiny

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = np.array([1.0, -2.0, 0.5], np.float32)


def loss_fn(w, batch):
    """sum (x.w)^2 / 8, whose gradient is sum 2 (x.w) x / 8."""
    product = batch["x"] @ w
    loss = jnp.sum(product**2) / 8
    return loss, Aux({"loss": loss, "mean": jnp.sum(product) / 8}, {"largest": jnp.max(product)})


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_sums_are_added_and_maxima_are_taken_over_micro_batches(micro_batches):
    fn = jax.jit(lambda w, x: accumulate(loss_fn, w, parts_of({"x": x}, micro_batches)))
    (loss, aux), gradient = fn(W, X)
    product = X.astype(np.float64) @ W
    np.testing.assert_allclose(loss, (product**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(aux.sums["mean"], product.mean(), rtol=1e-5, atol=1e-6)  # Of products of either sign.
    np.testing.assert_allclose(aux.maxima["largest"], product.max(), rtol=1e-6)
    np.testing.assert_allclose(gradient, (2 * product[:, None] * X / 8).sum(0), rtol=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_dtype_of_the_parameters_and_no_loss_scale(micro_batches, dtype):
    scale = LossScale(jnp.float32(1024.0), jnp.int32(0))
    (loss, _), gradient = accumulate(loss_fn, jnp.asarray(W, dtype), parts_of({"x": X}, micro_batches), None, scale)
    product = X.astype(np.float64) @ W
    assert gradient.dtype == dtype
    np.testing.assert_allclose(loss, (product**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient.astype(np.float32), (2 * product[:, None] * X / 8).sum(0), rtol=3e-2)


def test_the_number_of_parts_may_be_known_only_at_run_time():
    parts = X.reshape(4, 2, -1)

    @jax.jit
    def fn(w, count):
        return accumulate(loss_fn, w, Parts(lambda i: {"x": jnp.asarray(parts)[i]}, count))

    for count in (1, 3):
        (loss, aux), gradient = fn(W, count)
        (expected, expected_aux), wanted = accumulate(loss_fn, W, parts_of({"x": X[: 2 * count]}, 1))
        chex.assert_trees_all_close((loss, aux, gradient), (expected, expected_aux, wanted), rtol=1e-5, atol=1e-6)


def test_every_row_is_in_one_part_and_stays_on_its_device():
    """8 rows on 4 devices, two each, in 2 parts: a part takes one row of every device."""
    parts = np.asarray(split({"row": jnp.arange(8)}, 2)["row"])
    assert sorted(parts.reshape(-1)) == list(range(8))
    for part in parts:
        assert sorted(row // 2 for row in part) == [0, 1, 2, 3]


@pytest.mark.cpu
@pytest.mark.mesh
@pytest.mark.parametrize(("asked", "rows", "length", "parts"), [
    (0, 8, 512, 4), (0, 16, 256, 4), (0, 4, 256, 1), (0, 3, 2048, 1), (0, 12, 512, 6), (3, 12, 512, 3), (1, 8, 512, 1),
])
def test_the_default_on_a_cpu_is_parts_of_a_thousand_tokens(asked, rows, length, parts):
    assert chosen(asked, rows, length, tiny.model().sharding) == parts
    assert chosen(asked, rows, length, tiny.model((2, 2, 2)).sharding) == (asked or 1)
