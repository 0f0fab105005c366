"""Chunked log-probabilities, entropies and divergences equal the plain ones, in values and gradients."""

from __future__ import annotations

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models import heads
from jaxalign.models.heads import counted_first, gather_positions, length_mask, response_positions
from jaxalign.parallel.sharding import one_device

token_kl, token_stats, weighted_nll = (
    functools.partial(fn, sharding=one_device()) for fn in (heads.token_kl, heads.token_stats, heads.weighted_nll)
)
B, T, D, V = 3, 7, 5, 11


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(B, T, D)), 2 * rng.normal(size=(D, V))
    return hidden.astype(np.float32), weight.astype(np.float32), rng.integers(0, V, (B, T)).astype(np.int32)


def plain(hidden, weight, targets, temperature):
    """Log-probabilities and entropies from all logits together."""
    logp = jax.nn.log_softmax(hidden @ weight / temperature)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logp) * logp, -1)


def chunk(size):
    """The memory bound that gives chunks of `positions` positions."""
    return size * B * V


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_values_equal_numpy_in_float64(inputs, temperature):
    hidden, weight, targets = inputs
    logits = hidden.astype(np.float64) @ weight / temperature
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = token_stats(hidden, weight, targets, temperature)
    expected = np.log(probability[np.arange(B)[:, None], np.arange(T)[None], targets])
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(probability * np.log(probability)).sum(-1), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 100])
def test_chunks_of_any_size_equal_the_whole(inputs, size):
    hidden, weight, targets = inputs
    found = token_stats(hidden, weight, targets, 0.7, chunk(size))
    chex.assert_trees_all_close(tuple(found), plain(hidden, weight, targets, 0.7), rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_gradients_of_chunks_equal_those_of_the_whole(inputs, size, transposed):
    """Both outputs, unevenly weighted, with respect to the hidden states and the head. 7 is not a multiple of 3."""
    hidden, weight, targets = inputs
    w = np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

    def total(fn):
        def loss(h, u):
            logprobs, entropy = fn(h, u)
            return jnp.sum(logprobs * w[0] + entropy * w[1])

        return jax.grad(loss, argnums=(0, 1))(hidden, weight)

    found = total(lambda h, u: token_stats(h, u, targets, 0.7, chunk(size), transposed=transposed))
    chex.assert_trees_all_close(found, total(lambda h, u: plain(h, u, targets, 0.7)), rtol=1e-7, atol=2e-5)


def test_the_softmax_is_in_float32_for_bfloat16_states(inputs):
    hidden, weight, targets = inputs
    low = jnp.asarray(hidden, jnp.bfloat16)
    found = token_stats(low, weight, targets, 1.0, chunk(2))
    assert found.logprobs.dtype == found.entropy.dtype == jnp.float32
    rounded = np.asarray(low, np.float32), np.asarray(jnp.asarray(weight, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(found.logprobs, plain(*rounded, targets, 1.0)[0], atol=1e-5)


def test_equal_logits_have_the_entropy_of_a_uniform_distribution():
    found = token_stats(np.zeros((1, 2, D), np.float32), np.ones((D, V), np.float32), np.zeros((1, 2), np.int32))
    np.testing.assert_allclose(found.entropy, np.full((1, 2), np.log(V)), rtol=1e-6)
    np.testing.assert_allclose(found.logprobs, np.full((1, 2), -np.log(V)), rtol=1e-6)


def test_a_common_offset_of_the_logits_costs_no_digits():
    """Logits of 1000 and 1001: subtracting their logsumexp (ulp 6e-5) instead of their maximum would cost four digits."""
    found = token_stats(np.ones((1, 1, 1), np.float32), np.array([[1000.0, 1001.0]], np.float32), np.array([[1]]))
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(found.entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], rtol=1e-6)
    np.testing.assert_allclose(found.logprobs, [[np.log(p)]], rtol=1e-6)


def test_large_logits_do_not_overflow():
    found = token_stats(np.full((1, 1, 1), 1e4, np.float32), np.array([[1.0, -1.0]], np.float32), np.array([[1]]))
    np.testing.assert_allclose(found.logprobs, [[-2e4]])
    np.testing.assert_allclose(found.entropy, [[0.0]], atol=1e-6)


@pytest.fixture(scope="module")
def reference():
    """Another trunk and another head."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(B, T, D)).astype(np.float32), 2 * rng.normal(size=(D, V)).astype(np.float32)


def numpy_kl(hidden, weight, reference, temperature, cap=None):
    """KL(policy || reference) [B, T] from all logits together, in float64."""

    def logp(hidden, weight):
        logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)
        logits = (logits if cap is None else cap * np.tanh(logits / cap)) / temperature
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    p, q = logp(hidden, weight), logp(*reference)
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("temperature", "cap"), [(0.7, None), (1.0, 3.0), (1.3, None)])
def test_the_kl_equals_numpy_in_float64(inputs, reference, temperature, cap, size):
    hidden, weight, _ = inputs
    found = token_kl(hidden, weight, *reference, temperature, 2 * chunk(size), cap)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, numpy_kl(hidden, weight, reference, temperature, cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_gradient_of_the_kl_equals_finite_differences(inputs, reference, size, cap):
    """Along random directions of the states and of the head, in float64 numpy, with uneven weights of tokens."""
    hidden, weight, _ = inputs
    rng = np.random.default_rng(2)
    w = rng.normal(size=(B, T))

    def loss(h, u):
        return jnp.sum(w.astype(np.float32) * token_kl(h, u, *reference, 0.7, 2 * chunk(size), cap))

    gradients = jax.grad(loss, argnums=(0, 1))(hidden, weight)

    def whole(h, u):
        return np.sum(w * numpy_kl(h, u, reference, 0.7, cap))

    for which in range(2):
        direction = rng.normal(size=(hidden, weight)[which].shape)
        moved = [[x + sign * 1e-5 * direction if i == which else x for i, x in enumerate((hidden, weight))] for sign in (1, -1)]
        expected = (whole(*moved[0]) - whole(*moved[1])) / 2e-5
        assert np.sum(np.asarray(gradients[which], np.float64) * direction) == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_no_gradient_of_the_kl_reaches_the_reference(inputs, reference):
    hidden, weight, _ = inputs
    found = jax.grad(lambda r: jnp.sum(token_kl(hidden, weight, *r, 0.7)))(reference)
    assert not any(np.asarray(x).any() for x in found)


@pytest.mark.parametrize("temperature", [0.5, 0.9, 2.0])
def test_equal_heads_have_a_kl_of_exactly_0_and_no_gradient(inputs, temperature):
    hidden, weight, _ = inputs
    # Tests compile with level 0, where equal expressions may be rounded differently.
    optimised = jax.jit(token_kl, static_argnums=(4, 5), compiler_options={"xla_backend_optimization_level": 1})
    assert not np.asarray(optimised(hidden, weight, hidden, weight, temperature, 2 * chunk(3))).any()
    gradient = jax.grad(lambda h: jnp.sum(token_kl(h, weight, hidden, weight, temperature)))(hidden)
    # The error is p (1 - sum of p) per logit: 2^-23 times the head's weights, up to 6, over the temperature.
    np.testing.assert_allclose(gradient, np.zeros_like(hidden), atol=V * 2**-23 * 6 / temperature)


@pytest.mark.parametrize("used", [1, 4, 7])
def test_unused_positions_are_skipped_and_change_no_gradient(inputs, reference, used):
    hidden, weight, targets = inputs
    w = np.random.default_rng(1).normal(size=(3, B, T)).astype(np.float32) * (np.arange(T) < used)

    def total(h, u, **changes):
        stats = token_stats(h, u, targets, 0.7, **changes)
        kl = token_kl(h, u, *reference, 0.7, **changes)
        return jnp.sum(w[0] * stats.logprobs + w[1] * stats.entropy + w[2] * kl)

    fn = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    few, all_ = (fn(hidden, weight, **changes) for changes in ({"used": jnp.int32(used)}, {}))
    chex.assert_trees_all_close(few, all_, rtol=1e-7, atol=2e-5)
    found = token_stats(hidden, weight, targets, used=jnp.int32(used))
    assert not np.asarray(found.logprobs)[:, used:].any()  # here a chunk is one position


def test_the_logits_of_all_positions_are_never_materialised(inputs, reference):
    """No array in the program of value and gradient is as large as [B, T, V], in one piece or stacked."""
    hidden, weight, targets = inputs

    def loss(h, u):
        return jnp.sum(token_kl(h, u, *reference, 0.7, 2 * chunk(2)) + token_stats(h, u, targets, 0.7, chunk(2)).logprobs)

    program = str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight))
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([0-9,]+)\]", program)]
    assert B * 2 * V in sizes and max(sizes) < B * T * V


def test_positions_and_masks_come_from_lengths():
    np.testing.assert_array_equal(response_positions(jnp.array([3, 1]), 3), [[3, 4, 5], [1, 2, 3]])
    np.testing.assert_array_equal(length_mask(jnp.array([0, 2, 3]), 3), [[0, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_gathering_clips_positions_to_the_row():
    x = jnp.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(gather_positions(x, jnp.array([[0, 3, 9], [-2, 1, 2]])), [[0, 3, 3], [4, 5, 6]])
    np.testing.assert_array_equal(gather_positions(x[..., None], jnp.array([[2], [0]])), [[[2]], [[4]]])


@pytest.mark.parametrize(("size", "cap"), [(1, None), (3, None), (100, None), (3, 2.0)])
@pytest.mark.parametrize("used", [None, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_chunked_weighted_loss_and_its_gradients_equal_the_plain_ones(inputs, size, cap, used, transposed):
    """The loss is scaled by 3, as by a loss scale. Positions from `used` on have no weight."""
    hidden, weight, targets = inputs
    weights = np.random.default_rng(2).normal(size=(B, T)).astype(np.float32)
    weights[:, used:] = 0

    def whole(hidden, weight):
        logits = hidden @ weight
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -3 * jnp.sum(weights * logprobs)

    def chunked(hidden, weight):
        options = {"used": used and jnp.int32(used), "transposed": transposed}
        return 3 * weighted_nll(hidden, weight, targets, weights, chunk(size), cap, **options)

    np.testing.assert_allclose(chunked(hidden, weight), whole(hidden, weight), rtol=1e-5)
    gradients = (jax.grad(fn, (0, 1))(hidden, weight) for fn in (chunked, whole))
    chex.assert_trees_all_close(*gradients, rtol=1e-7, atol=1e-4)


@pytest.mark.parametrize("target", [-1, -100, V])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_uncounted_target_can_be_any_number(inputs, target, dtype):
    hidden, weight, targets = inputs
    hidden, weights = hidden.astype(dtype), np.ones((B, T), np.float32)
    weights[0, 1], changed = 0, targets.copy()
    changed[0, 1] = target

    def loss(hidden, targets):
        return weighted_nll(hidden, weight, targets, weights, chunk(2))

    found, good = (jax.value_and_grad(loss)(hidden, own) for own in (changed, targets))
    np.testing.assert_array_equal(found[0], good[0])
    np.testing.assert_array_equal(found[1], good[1])


def test_no_gradient_of_a_frozen_head_is_computed(inputs):
    """The loop carries no gradient of the head either."""
    hidden, weight, targets = inputs

    def loss(hidden):
        return weighted_nll(hidden, weight, targets, jnp.ones((B, T)), chunk(2))

    text = str(jax.make_jaxpr(jax.grad(loss))(hidden))
    assert f"f32[{B},2,{V}]" in text and f"f32[{D},{V}] = dot_general" not in text


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_the_head_is_summed_in_the_wanted_layout(inputs, transposed):
    hidden, weight, targets = inputs

    def loss(weight):
        stats = token_stats(hidden, weight, targets, 1.0, chunk(2), transposed=transposed)
        return weighted_nll(hidden, weight, targets, jnp.ones((B, T)), chunk(2), transposed=transposed) + stats.logprobs.sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(weight))
    products = {shape: text.count(f"f32[{shape}] = dot_general") for shape in (f"{D},{V}", f"{V},{D}")}
    assert products == ({f"{D},{V}": 0, f"{V},{D}": 2} if transposed else {f"{D},{V}": 2, f"{V},{D}": 0})


def test_counted_positions_come_first_and_gradients_return_to_their_positions():
    counted = np.asarray([[0, 1.0, 0, -2.0], [0, 0, 0, 0], [1, 1, 1, 0]], np.float32)
    x = np.random.default_rng(3).normal(size=(3, 4, 2)).astype(np.float32)
    used, (found, weights) = counted_first(counted, x, counted)
    assert used == 3
    np.testing.assert_array_equal(found, np.stack([x[0][[1, 3, 0, 2]], x[1], x[2]]))
    np.testing.assert_array_equal(weights, [[1, -2, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    factor = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    gradient = jax.grad(lambda x: jnp.sum(counted_first(counted, x)[1][0] * factor))(x)
    np.testing.assert_array_equal(gradient, np.concatenate([factor[:, [2, 0, 3, 1]], factor, factor]))
