"""Policy losses against worked figures, a loop, and finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.masked import AGGREGATIONS, aggregate, aggregate_total
from jaxalign.algorithms.policy_losses import cispo, clipped_surrogate, decoupled_surrogate, gspo, policy_gradient


def test_clipped_surrogate_gives_the_worked_figures():
    loss, stats = clipped_surrogate(np.array([1.0, -1.0, 0.1]), np.zeros(3), np.ones(3), 0.2, 0.2)
    np.testing.assert_allclose(loss, [-1.2, -0.36788, -1.10517], rtol=1e-5)
    np.testing.assert_allclose(stats.ratio, [np.e, 1 / np.e, np.exp(0.1)], rtol=1e-6)
    # With a positive advantage a ratio below the range is not clipped: the pessimistic bound is the unclipped term.
    np.testing.assert_array_equal(stats.clipped, [True, False, False])
    np.testing.assert_allclose(stats.approx_kl, [np.e - 2, 1 / np.e, np.exp(0.1) - 1.1], rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.sampled_from([0.0, 0.1, 0.2]), high=st.sampled_from([0.2, 0.28]))
def test_clipped_surrogate_equals_a_loop(seed, low, high):
    rng = np.random.default_rng(seed)
    logprobs, old = rng.normal(-2, 0.3, (2, 3, 4))
    advantages = rng.normal(size=(3, 4))
    expected, clipped = np.zeros((3, 4)), np.zeros((3, 4), bool)
    for b in range(3):
        for t in range(4):
            ratio = np.exp(logprobs[b, t] - old[b, t])
            plain = ratio * advantages[b, t]
            bounded = min(max(ratio, 1 - low), 1 + high) * advantages[b, t]
            expected[b, t], clipped[b, t] = -min(plain, bounded), bounded < plain
    loss, stats = jax.jit(clipped_surrogate)(logprobs, old, advantages, low, high)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats.clipped, clipped)


def test_at_ratio_1_the_gradient_is_the_policy_gradient():
    logprobs, advantages = jnp.array([[-1.0, -2.0, -0.5]]), jnp.array([[1.0, -0.5, 2.0]])
    gradient = jax.grad(lambda x: clipped_surrogate(x, logprobs, advantages)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)


def test_a_clipped_token_has_no_gradient():
    old, advantages = jnp.zeros(2), jnp.array([1.0, -1.0])
    logprobs = jnp.log(jnp.array([1.3, 0.7]))
    gradient = jax.grad(lambda x: clipped_surrogate(x, old, advantages)[0].sum())(logprobs)
    np.testing.assert_array_equal(gradient, [0, 0])


def test_the_gradient_is_the_finite_difference():
    # Away from the kinks at .8 and 1.2, where the two legitimately differ.
    with jax.enable_x64(True):
        logprobs = np.log([[0.5, 0.95, 1.1], [1.5, 0.6, 1.05]])
        old, advantages = np.zeros((2, 3)), np.array([[1.0, -2.0, 0.5], [-1.0, -1.0, 3.0]])
        check_grads(lambda x: clipped_surrogate(x, old, advantages)[0], (logprobs,), order=1, modes=["rev"])


def test_old_log_probs_and_advantages_have_no_gradient():
    def loss(old, advantages):
        return clipped_surrogate(jnp.full(2, -1.0), old, advantages)[0].sum()

    gradients = jax.grad(loss, argnums=(0, 1))(jnp.array([-1.1, -0.9]), jnp.array([1.0, -1.0]))
    np.testing.assert_array_equal(gradients, np.zeros((2, 2)))


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_masked_tokens_change_nothing_and_have_no_gradient(garbage):
    logprobs, mask = jnp.array([[-1.0, garbage]]), np.array([[1, 0]])
    old, advantages = np.array([[-1.1, 0.0]]), np.array([[1.0, garbage]])
    loss, stats = clipped_surrogate(logprobs, old, advantages, mask=mask)
    np.testing.assert_allclose(loss, [[-np.exp(0.1), 0]], rtol=1e-6)
    np.testing.assert_allclose(stats.ratio, [[np.exp(0.1), 1]], rtol=1e-6)
    assert float(stats.approx_kl[0, 1]) == 0
    assert not bool(stats.clipped[0, 1])
    gradient = jax.grad(lambda x: clipped_surrogate(x, old, advantages, mask=mask)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, [[-np.exp(0.1), 0]], rtol=1e-6)


def test_clips_outside_their_range_are_refused():
    with pytest.raises(ValueError, match=r"clip_low is 1.2; in \[0, 1\]"):
        clipped_surrogate(np.zeros(1), np.zeros(1), np.zeros(1), 1.2, 0.2)
    with pytest.raises(ValueError, match="clip_high is -0.2; at least 0"):
        clipped_surrogate(np.zeros(1), np.zeros(1), np.zeros(1), 0.2, -0.2)


def test_dual_clip_by_hand():
    # Ratio 5: with advantage -1 the loss is 5, and 3 with the bound; with +1 it is -1.2 in both cases.
    logprobs, old = np.log([5.0, 5.0, 2.0, 0.5]), np.zeros(4)
    advantages = np.array([-1.0, 1.0, -1.0, -1.0])
    loss, stats = clipped_surrogate(logprobs, old, advantages, dual_clip=3.0)
    np.testing.assert_allclose(loss, [3, -1.2, 2, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(stats.clipped, [True, True, False, True])
    gradient = jax.grad(lambda x: clipped_surrogate(x, old, advantages, dual_clip=3.0)[0].sum())(jnp.asarray(logprobs))
    np.testing.assert_allclose(gradient, [0, 0, 2, 0], rtol=1e-6)
    unbounded, _ = clipped_surrogate(logprobs, old, advantages)
    np.testing.assert_allclose(unbounded, [5, -1.2, 2, 0.8], rtol=1e-6)


def test_gspo_by_hand():
    # Row 1: ratios 2, 1/2, 8 have the geometric mean 2; row 2: 1/4 and 1 have 1/2. Clipped to [.8, 1.2].
    logprobs = np.log(np.array([[2.0, 0.5, 8.0], [0.25, 1.0, 7.0]]))
    mask, advantages = np.array([[1, 1, 1], [1, 1, 0]]), np.array([[1.0, 1, 1], [-2.0, -2, -2]])
    loss, stats = jax.jit(gspo)(logprobs, np.zeros((2, 3)), advantages, 0.2, 0.2, mask)
    np.testing.assert_allclose(loss, [[-1.2, -1.2, -1.2], [1.6, 1.6, 0]], rtol=1e-6)
    np.testing.assert_allclose(stats.ratio, [[2, 2, 2], [0.5, 0.5, 1]], rtol=1e-6)
    np.testing.assert_array_equal(stats.clipped, [[True, True, True], [True, True, False]])

    # Without clipping: the paper's -A s, with a gradient of -A s / |y| on each token.
    def objective(x):
        return aggregate(gspo(x, np.zeros((2, 3)), advantages, 1.0, 9.0, mask)[0], mask, "sequence_mean_token_mean")

    value, gradient = jax.jit(jax.value_and_grad(objective))(logprobs)
    assert float(value) == pytest.approx((-2 + 1) / 2)
    np.testing.assert_allclose(gradient, np.array([[-2 / 3, -2 / 3, -2 / 3], [0.5, 0.5, 0]]) / 2, rtol=1e-5)


def test_gspo_starts_at_a_ratio_of_exactly_1():
    logprobs = jnp.asarray(-np.random.default_rng(0).exponential(9, (3, 5)), jnp.float32)
    _, stats = jax.jit(gspo)(logprobs, logprobs, jnp.ones((3, 5)))
    np.testing.assert_array_equal(stats.ratio, np.ones((3, 5)))


def test_cispo_by_hand():
    # Ratios 6 and 1/2, weights 5 and 1/2: the first is clipped and keeps its gradient.
    logprobs, old, advantages = jnp.array([-1.0, -2.0]), jnp.array([-1 - np.log(6), -2 + np.log(2)]), jnp.array([2.0, -1.0])
    loss, stats = cispo(logprobs, old, advantages)
    np.testing.assert_allclose(loss, [10, -1], rtol=1e-6)
    np.testing.assert_array_equal(stats.clipped, [True, False])
    gradient = jax.grad(lambda x: cispo(x, old, advantages)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, [-10, 0.5], rtol=1e-6)


def test_policy_gradient_by_hand():
    logprobs, advantages = jnp.array([-1.0, -2.0]), jnp.array([2.0, -1.0])
    np.testing.assert_allclose(policy_gradient(logprobs, advantages), [2, -2])
    np.testing.assert_allclose(jax.grad(lambda x: policy_gradient(x, advantages).sum())(logprobs), [-2, 1])


def test_decoupled_surrogate_by_hand():
    # Behaviour .1 and .4, proximal .5 and .2: weights 5, capped at 2, and 1/2. Ratios 1.5, clipped to 1.2, and .9.
    behaviour, proximal = np.log([[0.1, 0.4]]), np.log([[0.5, 0.2]])
    logprobs, advantages = proximal + np.log([[1.5, 0.9]]), np.array([[1.0, -1.0]])
    loss, stats = decoupled_surrogate(logprobs, proximal, behaviour, advantages)
    np.testing.assert_allclose(loss, [[-2.4, 0.45]], rtol=1e-5)
    np.testing.assert_allclose(stats.weight, [[5, 0.5]], rtol=1e-5)
    np.testing.assert_array_equal(stats.capped, [[True, False]])
    np.testing.assert_array_equal(stats.surrogate.clipped, [[True, False]])
    loss, _ = decoupled_surrogate(logprobs, proximal, behaviour, advantages, weight_cap=None)
    np.testing.assert_allclose(loss, [[-6, 0.45]], rtol=1e-5)
    # With the same policy for both it equals PPO.
    loss, _ = decoupled_surrogate(logprobs, proximal, proximal, advantages)
    np.testing.assert_array_equal(loss, clipped_surrogate(logprobs, proximal, advantages)[0])


# Each is a function of (logprobs, old, advantages, mask) that returns the loss per token.
LOSSES = {
    "clipped_surrogate": lambda x, old, a, m: clipped_surrogate(x, old, a, 0.2, 0.28, m)[0],
    "dual clip": lambda x, old, a, m: clipped_surrogate(x, old, a, 0.2, 0.28, m, dual_clip=1.5)[0],
    "gspo": lambda x, old, a, m: gspo(x, old, a, 0.1, 0.2, m)[0],
    "cispo": lambda x, old, a, m: cispo(x, old, a, 0.5, 0.3, m)[0],
    "policy_gradient": lambda x, old, a, m: policy_gradient(x, a, m),
    # The proximal policy differs slightly from the behaviour policy.
    "decoupled_surrogate": lambda x, old, a, m: decoupled_surrogate(x, 0.9 * old, old, a, 0.2, 0.28, 1.1, m)[0],
}

# The same, jitted: ((sum, loss per token), gradient with respect to the log-probabilities).
WITH_GRADIENT = {
    name: jax.jit(jax.value_and_grad(lambda *arrays, f=function: (lambda y: (y.sum(), y))(f(*arrays)), has_aux=True))
    for name, function in LOSSES.items()
}


def _loop(name, logprobs, old, advantages, mask):
    """Return (loss, gradient with respect to each log-probability), token by token; the weights of CISPO are constants."""
    loss, gradient = np.zeros((2, *mask.shape))
    for b, t in np.argwhere(mask):
        log_ratio, low, high = logprobs[b, t] - old[b, t], 0.8, 1.28
        if name == "decoupled_surrogate":
            log_ratio = logprobs[b, t] - 0.9 * old[b, t]
        if name == "gspo":
            log_ratio, low, high = np.mean((logprobs - old)[b][mask[b]]), 0.9, 1.2
        ratio, advantage = np.exp(log_ratio), advantages[b, t]
        value, slope = -advantage * ratio, -advantage * ratio
        if -advantage * min(max(ratio, low), high) > value:
            value, slope = -advantage * min(max(ratio, low), high), 0
        if name == "dual clip" and advantage < 0 and value > -advantage * 1.5:
            value, slope = -advantage * 1.5, 0
        if name == "decoupled_surrogate":
            weight = min(np.exp(0.9 * old[b, t] - old[b, t]), 1.1)
            value, slope = weight * value, weight * slope
        if name in ("cispo", "policy_gradient"):
            slope = -advantage * (min(max(ratio, 0.5), 1.3) if name == "cispo" else 1)
            value = slope * logprobs[b, t]
        loss[b, t], gradient[b, t] = value, slope
    return loss, gradient


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_losses_and_gradients_equal_a_loop_under_any_mask(name, seed):
    rng = np.random.default_rng(seed)
    logprobs, old = rng.normal(-1, 0.4, (2, 4, 7))
    advantages, mask = rng.normal(size=(4, 7)), rng.random((4, 7)) < rng.uniform(0, 1)
    expected, slopes = _loop(name, logprobs, old, advantages, mask)
    spoilt = [np.where(mask, x, np.nan) for x in (logprobs, old, advantages)]
    (_, loss), gradient = WITH_GRADIENT[name](*spoilt, mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    # The slope of a token is with respect to its own log-probability; in GSPO it covers the loss of the whole row.
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cispo"])
def test_aggregated_gradients_are_finite_differences(name):
    # One advantage per row, as in GSPO. The weights of CISPO change with the log-probabilities but are constants to its
    # gradient.
    rng = np.random.default_rng(11)
    logprobs, old = rng.normal(-1, 0.3, (2, 4, 3))
    advantages = np.broadcast_to(np.array([[1.0], [-0.5], [-2.0], [0.3]]), (4, 3))
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    with jax.enable_x64(True):
        def loss(x):
            return LOSSES[name](x, old, advantages, mask)

        objective = jax.jit(lambda x: aggregate(loss(x), mask, "sequence_mean_token_mean"))
        check_grads(objective, (logprobs,), order=1, modes=["rev"])
        assert objective(logprobs).dtype == np.float64


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_padding_side_and_length_and_garbage_change_nothing(name, garbage):
    dense = np.random.default_rng(5).normal(-1, 0.3, (3, 4, 3))
    (_, loss), gradient = WITH_GRADIENT[name](*dense, np.ones((4, 3), bool))
    for places in ([0, 1, 2], [4, 5, 6], [1, 2, 5]):  # padded right, padded left, with a gap
        wide, mask = np.full((3, 4, 7), garbage), np.zeros((4, 7), bool)
        wide[:, :, places], mask[:, places] = dense, True
        (_, wide_loss), wide_gradient = WITH_GRADIENT[name](*wide, mask)
        for found, expected in ((wide_loss, loss), (wide_gradient, gradient)):
            np.testing.assert_allclose(np.asarray(found)[:, places], expected, rtol=1e-5, atol=1e-7)
            assert not np.asarray(found)[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name):
    rng = np.random.default_rng(7)
    logprobs, old, advantages = rng.normal(-1, 0.3, (3, 4, 7))
    mask = np.arange(7)[None, :] < np.array([7, 0, 2, 3])[:, None]

    def losses(rows):
        (_, loss), _ = WITH_GRADIENT[name](logprobs[rows], old[rows], advantages[rows], mask[rows])
        return [float(aggregate(loss, mask[rows], mode, aggregate_total(mask, mode, max_length=8))) for mode in AGGREGATIONS]

    first, second, whole = losses(slice(0, 2)), losses(slice(2, 4)), losses(slice(0, 4))
    np.testing.assert_allclose(np.add(first, second), whole, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_an_all_zero_mask_gives_zero_and_a_zero_gradient(name):
    garbage, mask = np.full((4, 7), np.nan), np.zeros((4, 7), bool)
    (_, loss), gradient = WITH_GRADIENT[name](garbage, garbage, garbage, mask)
    np.testing.assert_array_equal([loss, gradient], np.zeros((2, 4, 7)))
    for mode in AGGREGATIONS:
        assert float(aggregate(loss, mask, mode)) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_broadcast_and_narrow_types_are_computed_in_float32(name):
    full = np.zeros((4, 3))
    for other in (np.zeros((4, 1)), np.zeros(3)):
        with pytest.raises(ValueError, match="the same shape"):
            LOSSES[name](full, full, other, full)
    narrow = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
    assert jax.eval_shape(LOSSES[name], narrow, narrow, narrow, narrow).dtype == jnp.float32


@pytest.mark.parametrize("name", LOSSES)
def test_old_policies_and_advantages_of_the_other_losses_have_no_gradient(name):
    old, advantages = jnp.full((1, 2), -1.1), jnp.array([[1.0, -1.0]])

    def total(old, a):
        return LOSSES[name](jnp.full((1, 2), -1.0), old, a, np.ones((1, 2))).sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(old, advantages):
        np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


@pytest.mark.parametrize("name", LOSSES)
def test_an_infinite_ratio_gives_no_nan(name):
    """exp(200) is infinite in float32: its product with an advantage of 0, or with a gradient of 0, would be NaN."""
    logprobs, old = np.array([[0.0, 0.0, -1.0], [-1.0, 0.0, 0.0]]), np.array([[-200.0, -200.0, -1.0], [-1.0, -200.0, -900.0]])
    advantages, mask = np.array([[1.0, 0.0, 1.0], [-1.0, 0.0, 2.0]]), np.ones((2, 3))
    (_, loss), gradient = WITH_GRADIENT[name](logprobs, old, advantages, mask)
    assert np.isfinite(loss).all() and np.isfinite(gradient).all()
    if name == "clipped_surrogate":
        np.testing.assert_allclose(loss, [[-1.28, 0, -1], [1, 0, -2.56]], rtol=1e-6)
        np.testing.assert_allclose(gradient, [[0, 0, -1], [1, 0, 0]], rtol=1e-6)


def test_bad_settings_of_the_other_losses_are_refused():
    full = np.zeros((2, 3))
    with pytest.raises(ValueError, match="dual_clip - 1 is 0.0; a number above 0"):
        clipped_surrogate(full, full, full, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"clip_low is 1.5; in \[0, 1\]"):
        cispo(full, full, full, 1.5)
    with pytest.raises(ValueError, match=r"logprobs has shape \(3,\); \[B, N\]"):
        gspo(full[0], full[0], full[0])
    with pytest.raises(ValueError, match="weight_cap is 0.0; a number above 0"):
        decoupled_surrogate(full, full, full, full, weight_cap=0.0)
