"""Advantages and returns against worked figures and against their definitions as sums over the future, in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.advantages import (
    discounted_returns,
    gae,
    lambda_returns,
    reinforce_baseline,
    reinforce_plus_plus,
    vtrace,
)

# Without jit the scan would be compiled at each call.
REINFORCE_PLUS_PLUS = jax.jit(reinforce_plus_plus, static_argnames="group_size")


def _row(*numbers: float) -> np.ndarray:
    return np.array([numbers])


def test_terminal_rows_give_the_worked_figures():
    advantages, returns = gae(_row(0, 0, 1), _row(0.5, 0.4, 0.3), _row(1, 1, 1), 1.0, 0.95)
    np.testing.assert_allclose(advantages, _row(0.43675, 0.565, 0.7), rtol=1e-6)
    np.testing.assert_allclose(returns, _row(0.93675, 0.965, 1), rtol=1e-6)


def test_discounted_returns_give_the_worked_figures():
    _, returns = gae(_row(0, 0, 0, 1), _row(0, 0, 0, 1), _row(1, 1, 1, 1), 0.9, 0.95)
    np.testing.assert_allclose(returns, _row(0.65792, 0.7695, 0.9, 1), atol=5e-6)


def test_an_episode_end_within_a_row_gives_the_worked_figures():
    discounts = _row(0.9, 0.9, 0.9, 0, 0.9)
    advantages, _ = gae(
        _row(0, 0, 0, 0, 1), _row(-3, -2, -1, 0, 5), np.ones((1, 5)), discounts, 0.7, bootstrap_value=np.array([-1.0])
    )
    np.testing.assert_allclose(advantages, _row(2.2899, 1.73, 1, 0, -4.9), rtol=1e-6, atol=1e-6)


def test_returns_are_the_lambda_returns_of_the_worked_figures():
    # The value before the first step affects only its own advantage, so any value works.
    values, bootstrap = _row(17, 3, 1, 5, -5), np.array([3.0])
    _, returns = gae(_row(1, 0, -1, 0, 1), values, np.ones((1, 5)), _row(0.5, 0.9, 1, 0.5, 0.8), 0.75, bootstrap)
    np.testing.assert_allclose(returns, _row(1.64605469, 0.7228125, 0.7375, 0.65, 3.4), rtol=1e-5)


def _by_definition(rewards, values, mask, gamma, lam, bootstrap):
    """Equation 16 of the paper on unmasked steps only: the discounted sum of future errors."""
    advantages = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        steps = np.flatnonzero(mask[b])
        following = [*(values[b, t] for t in steps[1:]), bootstrap[b]]
        # `following` has one entry too many for a row without steps.
        errors = [rewards[b, t] + gamma[b, t] * v - values[b, t] for t, v in zip(steps, following, strict=False)]
        for start, t in enumerate(steps):
            weight = 1.0
            for ahead in range(start, len(steps)):
                advantages[b, t] += weight * errors[ahead]
                weight *= gamma[b, steps[ahead]] * lam
    return advantages, np.where(mask, advantages + values, 0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_equals_the_definition_under_any_mask(seed, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 3, 7))
    gamma, bootstrap = rng.choice([0, 0.9, 1], size=(3, 7)), rng.normal(size=3)
    mask = rng.random((3, 7)) < rng.uniform(0, 1)
    expected = _by_definition(rewards, values, mask, gamma, lam, bootstrap)
    values, rewards = np.where(mask, values, 999), np.where(mask, rewards, np.nan)
    advantages, returns = jax.jit(gae)(rewards, values, mask, gamma, lam, bootstrap)
    np.testing.assert_allclose(advantages, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, expected[1], rtol=1e-5, atol=1e-5)


def test_a_truncated_response_is_bootstrapped_across_its_padding():
    # One step with gamma 1, lambda 1: advantage r + V_next - V, whatever padding follows.
    advantages, returns = gae(_row(0.5, 0), _row(2, 77), _row(1, 0), 1.0, 1.0, bootstrap_value=np.array([3.0]))
    np.testing.assert_allclose(advantages, _row(1.5, 0))
    np.testing.assert_allclose(returns, _row(3.5, 0))


def test_rows_are_independent():
    rng = np.random.default_rng(3)
    rewards, values = rng.normal(size=(2, 4, 5))
    mask = np.arange(5)[None, :] < np.array([5, 2, 0, 3])[:, None]
    together = gae(rewards, values, mask, 0.99, 0.95)
    for b in range(4):
        alone = gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], 0.99, 0.95)
        np.testing.assert_array_equal(together[0][b : b + 1], alone[0])
        np.testing.assert_array_equal(together[1][b : b + 1], alone[1])
    assert not np.asarray(together[0])[2].any()


def test_integer_rewards_are_cast_to_float():
    advantages, _ = gae(np.array([[0, 1]]), np.array([[0, 0]]), np.ones((1, 2), bool), 0.5, 0.5)
    np.testing.assert_allclose(advantages, _row(0.25, 1))


def test_lambda_and_gamma_outside_their_range_are_refused():
    arguments = _row(0.0), _row(0.0), _row(1)
    with pytest.raises(ValueError, match=r"lam is 1.5; in \[0, 1\]"):
        gae(*arguments, 1.0, 1.5)
    with pytest.raises(ValueError, match=r"gamma is -0.1; in \[0, 1\]"):
        gae(*arguments, -0.1, 0.5)
    with pytest.raises(ValueError, match=r"bootstrap_value has shape \(2,\)"):
        gae(*arguments, 1.0, 0.5, np.zeros(2))
    with pytest.raises(ValueError, match=r"gamma has shape \(1, 3\)"):
        gae(*arguments, np.ones((1, 3)), 0.5)


def test_lambda_returns_give_the_worked_figures():
    returns = lambda_returns(_row(1, 0, -1, 0, 1), _row(3, 1, 5, -5, 3), np.ones((1, 5)), _row(0.5, 0.9, 1, 0.5, 0.8), 0.75)
    np.testing.assert_allclose(returns, _row(1.64605469, 0.7228125, 0.7375, 0.65, 3.4), rtol=1e-6)


def test_discounted_returns_by_hand():
    # Backwards with gamma 1/2: 4; 0 + 2 = 2; 2 + 1 = 3. Truncated before a value of 8: 8; 4; 4.
    rewards, mask = _row(2, 0, 4), np.ones((1, 3))
    np.testing.assert_allclose(discounted_returns(rewards, mask, 0.5), _row(3, 2, 4))
    np.testing.assert_allclose(discounted_returns(rewards, mask, 0.5, np.array([8.0])), _row(4, 4, 8))
    # The episode ends after the first step.
    np.testing.assert_allclose(discounted_returns(rewards, mask, _row(0, 0.5, 0.5)), _row(2, 2, 4))


def test_reinforce_baseline_by_hand():
    advantages, returns = reinforce_baseline(_row(2, 0, 4), _row(1, 1, 1), np.ones((1, 3)), 0.5)
    np.testing.assert_allclose(returns, _row(3, 2, 4))
    np.testing.assert_allclose(advantages, _row(2, 1, 3))


def test_vtrace_by_hand():
    # Ratios 2 and .5: rho and c are 1 and .5. Errors .5 (1 - .25) = .375 and 0 + .25 - .5 = -.25; targets .25 + .375 and .5 -
    # .25 + .375. Advantages .5 (1 - .25), and 1.5 (.625 - .5) under the wider clip.
    targets, advantages = vtrace(_row(0, 1), _row(0.5, 0.25), np.log(_row(2, 0.5)), np.ones((1, 2)), 1.0, pg_rho_clip=1.5)
    np.testing.assert_allclose(targets, _row(0.625, 0.625), rtol=1e-6)
    np.testing.assert_allclose(advantages, _row(0.1875, 0.375), rtol=1e-6)


def test_reinforce_plus_plus_by_hand():
    # Returns 1, 1 | 3, 3 over four tokens: mean 2, standard deviation 1.
    rewards, mask = np.array([[0.0, 1.0, 9.0], [0.0, 3.0, 9.0]]), np.array([[1, 1, 0], [1, 1, 0]])
    np.testing.assert_allclose(REINFORCE_PLUS_PLUS(rewards, mask), [[-1, -1, 0], [1, 1, 0]], rtol=1e-6)
    # A hard and an easy prompt: totals 0, 2 | 10, 12. Minus the group mean: -1, 1 | -1, 1, with one token each.
    rewards, mask = np.array([[0.0], [2.0], [10.0], [12.0]]), np.ones((4, 1))
    np.testing.assert_allclose(REINFORCE_PLUS_PLUS(rewards, mask, group_size=2), [[-1], [1], [-1], [1]], rtol=1e-6)
    plain = np.array([-6, -4, 4, 6]) / np.sqrt(26)
    np.testing.assert_allclose(REINFORCE_PLUS_PLUS(rewards, mask)[:, 0], plain, rtol=1e-6)


def test_the_baseline_of_reinforce_plus_plus_can_be_subtracted_from_scores_or_rewards():
    # Without a KL term only the last token has a reward, so subtracting the mean before or after is equivalent.
    scores, lengths = np.array([1.0, 0.0, 0.5, 0.25]), np.array([3, 1, 2, 4])
    position = np.arange(4)[None, :]
    mask, is_last = position < lengths[:, None], position == lengths[:, None] - 1
    centred = scores - np.array([0.5, 0.5, 0.375, 0.375])
    here = REINFORCE_PLUS_PLUS(np.where(is_last, scores[:, None], 0), mask, 0.9, group_size=2)
    before = REINFORCE_PLUS_PLUS(np.where(is_last, centred[:, None], 0), mask, 0.9)
    np.testing.assert_allclose(here, before, atol=1e-6)


def _discounted_by_definition(rewards, gamma, bootstrap):
    """Discounted rewards-to-go of the steps of one row."""
    returns = np.zeros(len(rewards))
    for start in range(len(rewards)):
        weight = 1.0
        for ahead in range(start, len(rewards)):
            returns[start] += weight * rewards[ahead]
            weight *= gamma[ahead]
        returns[start] += weight * bootstrap
    return returns


def _lambda_by_definition(rewards, next_values, gamma, lam):
    """(1 - lam) times the sum of lam^(n-1) times the n-step return, with the remaining weight on the longest."""
    returns = np.zeros(len(rewards))
    for start in range(len(rewards)):
        longest = len(rewards) - start
        for n in range(1, longest + 1):
            steps = slice(start, start + n)
            n_step = _discounted_by_definition(rewards[steps], gamma[steps], next_values[start + n - 1])[0]
            returns[start] += n_step * (lam ** (n - 1) if n == longest else (1 - lam) * lam ** (n - 1))
    return returns


def _vtrace_by_definition(rewards, values, ratios, gamma, lam, clips, bootstrap):
    """Equation 1 of the paper: V plus the later errors, each multiplied by the traces in between."""
    rho, trace, pg_rho = (np.minimum(ratios, clip) for clip in clips)
    ahead_values = np.append(values[1:], bootstrap)
    errors = rho * (rewards + gamma * ahead_values - values)
    targets = np.array(values)
    for start in range(len(rewards)):
        weight = 1.0
        for ahead in range(start, len(rewards)):
            targets[start] += weight * errors[ahead]
            weight *= gamma[ahead] * lam * trace[ahead]
    ahead = (1 - lam) * ahead_values + lam * np.append(targets[1:], bootstrap)
    return targets, pg_rho * (rewards + gamma * ahead - values)


def _by_row(mask, function, *arrays):
    """Apply `function` to the unmasked entries of each row and scatter the result back."""
    outputs = None
    for b in range(len(mask)):
        chosen = mask[b]
        results = function(*(x[b][chosen] if x.ndim == 2 else x[b] for x in arrays))
        results = results if isinstance(results, tuple) else (results,)
        outputs = outputs or [np.zeros(mask.shape) for _ in results]
        for output, result in zip(outputs, results, strict=True):
            output[b, chosen] = result
    return outputs


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_returns_equal_their_definitions_under_any_mask(seed, lam):
    rng = np.random.default_rng(seed)
    rewards, values, log_ratios = rng.normal(size=(3, 3, 7))
    gamma, bootstrap = rng.choice([0, 0.9, 1], size=(3, 7)), rng.normal(size=3)
    mask = rng.random((3, 7)) < rng.uniform(0, 1)
    clips = rng.uniform(0.5, 3, size=3)
    (discounted,) = _by_row(mask, _discounted_by_definition, rewards, gamma, bootstrap)
    (mixed,) = _by_row(mask, lambda r, v, g: _lambda_by_definition(r, v, g, lam), rewards, values, gamma)
    off_policy = _by_row(
        mask,
        lambda r, v, d, g, last: _vtrace_by_definition(r, v, np.exp(d), g, lam, clips, last),
        rewards, values, log_ratios, gamma, bootstrap,
    )
    rewards, values, log_ratios = (np.where(mask, x, np.nan) for x in (rewards, values, log_ratios))
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(jax.jit(discounted_returns)(rewards, mask, gamma, bootstrap), discounted, **close)
    np.testing.assert_allclose(jax.jit(lambda_returns)(rewards, values, mask, gamma, lam), mixed, **close)
    advantages, returns = jax.jit(reinforce_baseline)(rewards, values, mask, gamma, bootstrap)
    np.testing.assert_allclose(returns, discounted, **close)
    np.testing.assert_allclose(advantages, np.where(mask, discounted - values, 0), **close)
    found = jax.jit(vtrace)(rewards, values, log_ratios, mask, gamma, lam, *clips, bootstrap)
    np.testing.assert_allclose(found.targets, off_policy[0], **close)
    np.testing.assert_allclose(found.advantages, off_policy[1], **close)
    # On samples of the policy itself V-trace equals GAE, for every lambda.
    found = jax.jit(vtrace)(rewards, values, jnp.zeros(mask.shape), mask, gamma, lam, 1.0, 1.0, 1.0, bootstrap)
    advantages, returns = _by_definition(rewards, values, mask, gamma, lam, bootstrap)
    np.testing.assert_allclose(found.targets, returns, **close)
    np.testing.assert_allclose(found.advantages, advantages, **close)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.9, 1.0]), group_size=st.sampled_from([None, 2, 3]))
def test_reinforce_plus_plus_equals_a_loop(seed, gamma, group_size):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(6, 5)), rng.random((6, 5)) < rng.uniform(0.2, 1)
    shaped = np.where(mask, rewards, 0)
    if group_size:
        for start in range(0, 6, group_size):
            rows = [b for b in range(start, start + group_size) if mask[b].any()]
            baseline = np.mean([shaped[b].sum() for b in rows]) if rows else 0
            for b in rows:
                shaped[b, np.flatnonzero(mask[b])[-1]] -= baseline
    expected = _by_row(mask, lambda r: _discounted_by_definition(r, np.full(len(r), gamma), 0.0), shaped)[0]
    chosen = expected[mask]
    if chosen.size:
        expected = np.where(mask, (expected - chosen.mean()) / np.sqrt(chosen.var() + 1e-8), 0)
    found = REINFORCE_PLUS_PLUS(np.where(mask, rewards, np.inf), mask, gamma, group_size=group_size)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


BOOTSTRAP = np.array([0.5, -1.0, 2.0, 0.0])
# Each is a function of (rewards, values, log_ratios, mask), and returns one array or several.
PLAIN = {
    "gae": lambda r, v, d, m: gae(r, v, m, 0.9, 0.8, BOOTSTRAP),
    "discounted_returns": lambda r, v, d, m: discounted_returns(r, m, 0.9, BOOTSTRAP),
    "lambda_returns": lambda r, v, d, m: lambda_returns(r, v, m, 0.9, 0.8),
    "vtrace": lambda r, v, d, m: vtrace(r, v, d, m, 0.9, 0.8, 1.1, 1.0, 1.3, BOOTSTRAP),
    "reinforce_baseline": lambda r, v, d, m: reinforce_baseline(r, v, m, 0.9, BOOTSTRAP),
    "reinforce_plus_plus": lambda r, v, d, m: reinforce_plus_plus(r, m, 0.9),
    "reinforce_plus_plus, baseline": lambda r, v, d, m: reinforce_plus_plus(r, m, 0.9, 2),
}
ESTIMATORS = {name: jax.jit(function) for name, function in PLAIN.items()}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_padding_side_and_length_gaps_and_garbage_change_nothing(name, garbage):
    rng = np.random.default_rng(5)
    dense = rng.normal(size=(3, 4, 3))
    alone = ESTIMATORS[name](*dense, np.ones((4, 3)))
    for places in ([0, 1, 2], [4, 5, 6], [1, 2, 5]):  # padded right, padded left, with a gap
        wide, mask = np.full((3, 4, 7), garbage), np.zeros((4, 7))
        wide[:, :, places], mask[:, places] = dense, 1
        for part, expected in zip(jax.tree.leaves(ESTIMATORS[name](*wide, mask)), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(np.asarray(part)[:, places], expected, rtol=1e-5, atol=1e-6)
            assert not np.asarray(part)[mask == 0].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_all_zero_mask_gives_zero_and_a_zero_gradient(name):
    inputs = jnp.full((3, 4, 3), jnp.nan)

    def total(inputs):
        return sum(jnp.sum(part) for part in jax.tree.leaves(PLAIN[name](*inputs, np.zeros((4, 3)))))

    value, gradient = jax.jit(jax.value_and_grad(total))(inputs)
    assert float(value) == 0
    np.testing.assert_array_equal(gradient, np.zeros((3, 4, 3)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_is_the_finite_difference(name):
    # The weights of V-trace are constants: log-ratios get no gradient.
    mask = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 0]])
    rng = np.random.default_rng(1)
    log_ratios, *weights = rng.normal(size=(3, 4, 4))
    with jax.enable_x64(True):
        rewards, values = rng.normal(size=(2, 4, 4))

        def total(rewards, values):
            parts = jax.tree.leaves(PLAIN[name](rewards, values, log_ratios, mask))
            assert all(part.dtype == np.float64 for part in parts)
            return sum(jnp.sum(weight * part) for weight, part in zip(weights, parts, strict=False))

        check_grads(jax.jit(total), (rewards, values), order=1, modes=["rev"])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_narrow_types_are_computed_in_float32(name):
    shapes = [jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((4, 3), jnp.bool_)]
    assert all(part.dtype == jnp.float32 for part in jax.tree.leaves(jax.eval_shape(ESTIMATORS[name], *shapes)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_is_broadcast(name):
    full = np.zeros((4, 3))
    for other in (np.zeros((4, 1)), np.zeros(3)):
        with pytest.raises(ValueError, match=r"the same shape.*\(4, 3\)"):
            ESTIMATORS[name](full, full, full, other)


def test_vtrace_handles_overflowing_ratios_and_has_no_gradient_into_them():
    def total(log_ratios):
        return sum(jnp.sum(part) for part in vtrace(_row(1, 0), _row(0, 1), log_ratios, np.ones((1, 2))))

    value, gradient = jax.value_and_grad(total)(jnp.array([[1000.0, 0.0]]))
    # By hand: error 0 - 1 at the end, and 1 + 1 - 0 before it; targets 1 and 0; advantages 1 + 0 - 0 and -1.
    assert float(value) == pytest.approx(1)
    np.testing.assert_array_equal(gradient, [[0, 0]])


def test_bad_arguments_are_refused():
    arguments = _row(0.0), _row(0.0), _row(0.0), _row(1)
    with pytest.raises(ValueError, match="rho_clip is 0.0; a number above 0"):
        vtrace(*arguments, rho_clip=0.0)
    with pytest.raises(ValueError, match=r"lam is -0.5; in \[0, 1\]"):
        vtrace(*arguments, lam=-0.5)
    with pytest.raises(ValueError, match=r"lam has shape \(1,\)"):
        lambda_returns(_row(0.0), _row(0.0), _row(1), 1.0, np.ones(1))
    with pytest.raises(ValueError, match=r"gamma is 2.0; in \[0, 1\]"):
        discounted_returns(_row(0.0), _row(1), 2.0)
    with pytest.raises(ValueError, match="4 rows; a multiple of group_size = 3 is expected"):
        reinforce_plus_plus(np.zeros((4, 2)), np.ones((4, 2)), group_size=3)
    with pytest.raises(ValueError, match="group_size is 1; at least 2"):
        reinforce_plus_plus(np.zeros((4, 2)), np.ones((4, 2)), group_size=1)
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\); \[B, T\]"):
        discounted_returns(np.zeros(3), np.ones(3))
