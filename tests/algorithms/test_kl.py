"""KL estimators against worked figures and against the exact sum; controllers against a hand calculation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.kl import ESTIMATORS, LOSSES, full_kl, kl_loss, kl_penalty, update_kl_coef

LOGPROBS, REFERENCE = np.array([[0.5, 0.2, 0.1]]), np.array([[0.4, 0.3, 0.0]])
WORKED = {
    "k1": [0.1, -0.1, 0.1],
    "abs": [0.1, 0.1, 0.1],
    "k2": [0.005, 0.005, 0.005],
    "k3": [np.exp(-0.1) - 1 + 0.1, np.exp(0.1) - 1 - 0.1, np.exp(-0.1) - 1 + 0.1],
}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_penalties_give_the_worked_figures(kind):
    np.testing.assert_allclose(kl_penalty(LOGPROBS, REFERENCE, kind), [WORKED[kind]], rtol=1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equal_policies_have_no_penalty(kind):
    logprobs = -np.random.default_rng(0).exponential(3, (4, 5)).astype(np.float32)
    np.testing.assert_array_equal(kl_penalty(logprobs, logprobs, kind), np.zeros((4, 5)))


def test_k3_is_accurate_near_zero():
    # d = 1e-3: exp(-d) - 1 + d is d^2 / 2 - d^3 / 6. exp(-d) - 1 in float32 has an error of 6e-8, an eighth;
    # expm1 has an error of one ulp of 1e-3, 1.2e-10, or a relative error of 2.4e-4.
    estimate = float(kl_penalty(np.zeros(1, np.float32), np.full(1, -1e-3, np.float32), "k3")[0])
    assert estimate == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_k1_and_k3_are_unbiased_and_full_kl_is_the_sum(seed):
    rng = np.random.default_rng(seed)
    logits, reference = rng.normal(0, 2, (2, 6))
    logp = logits - np.log(np.exp(logits).sum())
    logq = reference - np.log(np.exp(reference).sum())
    exact = sum(np.exp(p) * (p - q) for p, q in zip(logp, logq, strict=True))
    assert float(full_kl(logits, reference)) == pytest.approx(exact, rel=1e-4, abs=1e-6)
    for kind in ("k1", "k3"):
        # Compute the exact expectation over the policy, token by token, instead of sampling.
        expectation = np.sum(np.exp(logp) * np.asarray(kl_penalty(logp, logq, kind)))
        assert expectation == pytest.approx(exact, rel=1e-3, abs=1e-5)
    assert (np.asarray(kl_penalty(logp, logq, "k3")) >= 0).all()


def test_full_kl_gives_the_worked_figure():
    value = full_kl(np.log([0.98, 0.01, 0.01]), np.log([0.01, 0.01, 0.98]))
    assert float(value) == pytest.approx(4.4474, abs=5e-5)


def test_full_kl_with_impossible_tokens():
    # By hand: KL((1/2, 1/2, 0) || (1/4, 1/4, 1/2)) = log 2. In the other direction a possible token is impossible: infinite.
    narrow, wide = np.log([0.5, 0.5, 1.0]) + np.array([0, 0, -np.inf]), np.log([0.25, 0.25, 0.5])
    assert float(full_kl(narrow, wide)) == pytest.approx(np.log(2), rel=1e-6)
    assert float(full_kl(narrow, narrow)) == 0
    assert float(full_kl(wide, narrow)) == np.inf


def test_the_adaptive_controller_gives_the_worked_figure():
    assert float(update_kl_coef(0.15, 7.8, 6, 10000, 512)) == pytest.approx(0.151536, rel=1e-6)


def test_the_adaptive_controller_by_hand_within_its_clip():
    # Error 6.6 / 6 - 1 = .1; .2 * (1 + .1 * 100 / 1000) = .202. Far below the target the error is clipped to -.2.
    assert float(update_kl_coef(0.2, 6.6, 6, 1000, 100)) == pytest.approx(0.202, rel=1e-6)
    assert float(update_kl_coef(0.2, 0.0, 6, 1000, 100)) == pytest.approx(0.2 * 0.98, rel=1e-6)
    assert float(update_kl_coef(0.2, 6.0, 6, 1000, 100)) == pytest.approx(0.2, rel=1e-6)


def test_the_adaptive_controller_under_jit():
    updated = jax.jit(update_kl_coef, static_argnames="kind")(0.15, 7.8, 6.0, 10000, 512)
    assert float(updated) == pytest.approx(0.151536, rel=1e-6)


@pytest.mark.parametrize("coef", [0.0, 0.05])
def test_the_fixed_controller_leaves_the_coefficient(coef):
    assert float(update_kl_coef(coef, 100.0, 6, 10000, 512, kind="fixed")) == np.float32(coef)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="kind is 'k4'; one of k1, k2, k3, abs"):
        kl_penalty(LOGPROBS, REFERENCE, "k4")
    with pytest.raises(ValueError, match="kind is 'linear'; one of fixed, adaptive"):
        update_kl_coef(0.1, 1, 6, 100, 10, kind="linear")
    with pytest.raises(ValueError, match="target is 0; a number above 0"):
        update_kl_coef(0.1, 1, 0, 100, 10)
    with pytest.raises(ValueError, match="horizon is 0; a number above 0"):
        update_kl_coef(0.1, 1, 6, 0, 10)
    with pytest.raises(ValueError, match=r"5 \* horizon - num_samples is"):
        update_kl_coef(0.1, 1, 6, 100, 500)
    with pytest.raises(ValueError, match="measured_kl has shape"):
        update_kl_coef(0.1, np.ones(3), 6, 100, 10)


def _expected_gradient(kind, logits, reference):
    """Expected gradient, by the logits, of the loss on tokens of the policy: a sum over the vocabulary instead of samples."""

    def loss(varied):
        # The tokens are drawn from the policy as given; only the loss on them is differentiated.
        if kind == "full":
            return kl_loss(varied[None], reference[None], kind)[0]
        return jnp.sum(jax.nn.softmax(logits) * kl_loss(jax.nn.log_softmax(varied), jax.nn.log_softmax(reference), kind))

    return np.asarray(jax.jit(jax.grad(loss))(logits))


def _exact_kl(p_logits, q_logits):
    p, q = (x - np.log(np.sum(np.exp(x))) for x in (p_logits, q_logits))
    return np.sum(np.exp(p) * (p - q))


def _finite_difference(function, x, step=1e-5):
    units = np.eye(len(x)) * step
    return np.array([(function(x + unit) - function(x - unit)) / (2 * step) for unit in units])


def test_each_kl_loss_has_the_gradient_stated_in_its_docstring():
    logits, reference = np.random.default_rng(0).normal(size=(2, 5))
    forward = _finite_difference(lambda x: _exact_kl(x, reference), logits)
    reverse = _finite_difference(lambda x: _exact_kl(reference, x), logits)
    with jax.enable_x64(True):
        gradients = {kind: _expected_gradient(kind, jnp.asarray(logits), jnp.asarray(reference)) for kind in LOSSES}
    np.testing.assert_allclose(gradients["k1"], np.zeros(5), atol=1e-12)
    np.testing.assert_allclose(gradients["k2"], forward, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradients["full"], forward, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradients["k3"], reverse, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradient_of_a_kl_loss_is_the_finite_difference(kind):
    with jax.enable_x64(True):
        logprobs, reference = np.random.default_rng(1).normal(-1, 0.5, (2, 2, 3, 4))
        check_grads(jax.jit(lambda x: kl_loss(x, reference, kind)), (logprobs,), order=1, modes=["rev"])
        assert jax.eval_shape(lambda x: kl_loss(x, reference, kind), logprobs).dtype == np.float64


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_a_kl_loss_ignores_masked_tokens(kind, garbage):
    logprobs, reference = jnp.array([[garbage, 0.5, 0.2, 0.1]]), np.array([[0.0, 0.4, 0.3, 0.0]])
    mask = np.array([[0, 1, 1, 1]])
    np.testing.assert_allclose(kl_loss(logprobs, reference, kind, mask), [[0, *WORKED[kind]]], rtol=1e-5)
    slopes = {"k1": [1, 1, 1], "k2": [0.1, -0.1, 0.1], "abs": [1, -1, 1]}
    slopes["k3"] = [1 - np.exp(-0.1), 1 - np.exp(0.1), 1 - np.exp(-0.1)]
    gradient = jax.grad(lambda x: kl_loss(x, reference, kind, mask).sum())(logprobs)
    np.testing.assert_allclose(gradient, [[0, *slopes[kind]]], rtol=1e-5)
    gradient = jax.grad(lambda x: kl_loss(logprobs, x, kind, mask).sum())(jnp.asarray(reference))
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_the_full_kl_loss_ignores_masked_tokens_and_impossible_ones(garbage):
    # By hand, as above: log 2 where the policy is (1/2, 1/2, 0) and the reference (1/4, 1/4, 1/2).
    logits = jnp.array([[[0.0, 0.0, -np.inf], [garbage] * 3]])
    reference = np.log([[[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]]])
    loss = jax.jit(lambda x, y: kl_loss(x, y, "full", np.array([[1, 0]])))
    np.testing.assert_allclose(loss(logits, reference), [[np.log(2), 0]], rtol=1e-6)
    # The two possible tokens have equal ratios, so neither is changed; the impossible one stays impossible.
    np.testing.assert_allclose(jax.grad(lambda x: loss(x, reference).sum())(logits), np.zeros((1, 2, 3)), atol=1e-7)
    np.testing.assert_array_equal(jax.grad(lambda y: loss(logits, y).sum())(jnp.asarray(reference)), np.zeros((1, 2, 3)))


def test_bad_kl_losses_are_refused():
    with pytest.raises(ValueError, match="kind is 'k4'; one of k1, k2, k3, abs, full"):
        kl_loss(LOGPROBS, REFERENCE, "k4")
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\); the shape of the loss = \(1,\)"):
        kl_loss(LOGPROBS, REFERENCE, "full", np.ones((1, 3)))
    with pytest.raises(ValueError, match="the same shape"):
        kl_loss(LOGPROBS, REFERENCE[:, :1])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_estimators_losses_and_controller_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    logprobs, reference = rng.normal(-1, 0.7, (2, 3, 4))
    mask = rng.random((3, 4)) < 0.7
    for kind in ESTIMATORS:
        expected = np.zeros((3, 4))
        for b, t in np.ndindex(3, 4):
            d = logprobs[b, t] - reference[b, t]
            expected[b, t] = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d, "abs": abs(d)}[kind]
        np.testing.assert_allclose(kl_penalty(logprobs, reference, kind), expected, rtol=1e-5, atol=1e-6)
        spoilt = np.where(mask, logprobs, np.nan), np.where(mask, reference, -np.inf)
        np.testing.assert_allclose(kl_loss(*spoilt, kind, mask), np.where(mask, expected, 0), rtol=1e-5, atol=1e-6)
    # Use the last axis as a vocabulary of four.
    expected = np.zeros(3)
    for b in range(3):
        expected[b] = _exact_kl(logprobs[b], reference[b]) if mask[b, 0] else 0
    found = kl_loss(np.where(mask[:, :1], logprobs, np.nan), reference, "full", mask[:, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    coef, measured, target, horizon = rng.uniform(0.01, 1), rng.uniform(0, 9), rng.uniform(1, 9), rng.integers(100, 999)
    count = rng.integers(0, 100)
    error = min(max(measured / target - 1, -0.2), 0.2)
    found = update_kl_coef(coef, measured, target, horizon, count)
    assert float(found) == pytest.approx(coef * (1 + error * count / horizon), rel=1e-5)
