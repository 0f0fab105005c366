"""Masked statistics against published figures, hand calculations, and numpy on the selected elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.algorithms.masked import (
    AGGREGATIONS,
    aggregate,
    aggregate_total,
    masked_mean,
    masked_sum,
    masked_variance,
    whiten,
)

SHAPE = (4, 6)
LOSS = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
MASK = np.array([[1, 1, 0], [1, 1, 1]])
STEPS = np.array([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])


def _case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.normal(), rng.uniform(0.1, 5), SHAPE).astype(np.float32)
    return x, rng.random(SHAPE) < rng.uniform(0, 1)


# The loops below use the list of selected numbers in float64.
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_statistics_equal_those_of_the_selected_numbers(seed):
    x, mask = _case(seed)
    selected = x[mask].astype(np.float64)
    spoilt = np.where(mask, x, np.nan)
    np.testing.assert_allclose(masked_sum(spoilt, mask), selected.sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(masked_mean(spoilt, mask), selected.mean() if selected.size else 0, rtol=1e-5, atol=1e-5)
    biased = selected.var() if selected.size else 0
    bessel = selected.var(ddof=1) if selected.size > 1 else 0
    np.testing.assert_allclose(masked_variance(spoilt, mask), biased, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(masked_variance(spoilt, mask, unbiased=True), bessel, rtol=1e-4, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_mean_along_an_axis_equals_a_loop(seed):
    x, mask = _case(seed)
    rows = [row[keep].mean() if keep.any() else 0 for row, keep in zip(x, mask, strict=True)]
    columns = [column[keep].mean() if keep.any() else 0 for column, keep in zip(x.T, mask.T, strict=True)]
    np.testing.assert_allclose(masked_mean(x, mask, axis=1), rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(masked_mean(x, mask, axis=0), columns, rtol=1e-5, atol=1e-5)


def test_a_fractional_mask_is_a_weight():
    assert float(masked_mean(np.array([1.0, 3.0, 9.0]), np.array([0.5, 1.5, 0.0]))) == pytest.approx(2.5)


def test_whitening_with_the_mean_kept_gives_the_published_figures():
    biased = [0.0508, 0.4381, 0.8254, 1.2127, 1.6, 1.9873, 2.3746, 2.7619, 3.1492]
    bessel = [0.1394, 0.5046, 0.8697, 1.2349, 1.6]
    ones = np.ones((3, 3))
    np.testing.assert_allclose(whiten(STEPS, ones, shift_mean=False).ravel(), biased, atol=5.1e-5)
    kept = whiten(STEPS, ones, shift_mean=False, unbiased=True).ravel()
    np.testing.assert_allclose(kept[:5], bessel, atol=5.1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_whitened_numbers_have_mean_0_and_variance_1(seed):
    x, mask = _case(seed)
    whitened = np.asarray(whiten(np.where(mask, x, np.inf), mask), np.float64)
    assert not whitened[~mask].any()
    if mask.sum() > 2:
        assert whitened[mask].mean() == pytest.approx(0, abs=1e-5)
        assert whitened[mask].var() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("level", [0.0, 0.1, 1e3, 12345.678])
def test_equal_values_whiten_to_zero(level):
    np.testing.assert_allclose(whiten(np.full(SHAPE, level), np.ones(SHAPE)), np.zeros(SHAPE), atol=1e-3)


def test_variance_far_from_zero_is_not_lost_to_rounding():
    x = np.array([[10000.0, 10001.0, 10002.0]])
    assert float(masked_variance(x, np.ones((1, 3)))) == pytest.approx(2 / 3, rel=1e-5)


# The sum 1.8 over 5 tokens, over 2 sequences, and over 2 sequences of at most 3 tokens.
@pytest.mark.parametrize("mode, expected", [*zip(AGGREGATIONS, (0.36, 0.325, 0.9, 0.3), strict=True)])
def test_aggregation_gives_the_worked_figures(mode, expected):
    assert float(aggregate(LOSS, MASK, mode)) == pytest.approx(expected, rel=1e-6)
    assert float(aggregate(LOSS, MASK.astype(bool), mode)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode, count", [*zip(AGGREGATIONS, (5, 2, 2, 2 * 10), strict=True)])
def test_totals_count_tokens_or_non_empty_sequences(mode, count):
    padded = np.concatenate([MASK, np.zeros((3, 3))])
    assert float(aggregate_total(padded, mode, max_length=10)) == count


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_rows_and_columns_change_nothing(mode):
    loss = np.pad(LOSS, ((0, 2), (0, 4)), constant_values=np.inf)
    mask = np.pad(MASK, ((0, 2), (0, 4)))
    padded, alone = aggregate(loss, mask, mode, max_length=5), aggregate(LOSS, MASK, mode, max_length=5)
    assert float(padded) == pytest.approx(float(alone), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(0, SHAPE[0]), mode=st.sampled_from(AGGREGATIONS))
def test_parts_with_the_global_total_add_up(seed, cut, mode):
    loss, mask = _case(seed)
    total = aggregate_total(mask, mode)
    parts = [float(aggregate(loss[rows], mask[rows], mode, total)) for rows in (slice(0, cut), slice(cut, None))]
    assert sum(parts) == pytest.approx(float(aggregate(loss, mask, mode)), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_all_zero_mask_gives_zero_and_a_zero_gradient(mode):
    loss, mask = jnp.full(SHAPE, jnp.nan), jnp.zeros(SHAPE)
    value, gradient = jax.value_and_grad(lambda x: aggregate(x, mask, mode))(loss)
    assert float(value) == 0
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))


def test_the_constant_normaliser_is_sequences_times_the_longest_length():
    # 1.8 over 2 sequences of at most 10 tokens. By default the maximum is the width of the array.
    assert float(aggregate(LOSS, MASK, "token_sum_constant", max_length=10)) == pytest.approx(0.09)
    assert float(aggregate(LOSS, MASK, "token_sum_constant")) == pytest.approx(0.3)
    # A token has the same weight in a short response and in a long one.
    gradient = jax.grad(lambda x: aggregate(x, MASK, "token_sum_constant", max_length=10))(jnp.asarray(LOSS))
    np.testing.assert_allclose(gradient, MASK / 20)


def test_all_zero_masks_give_zero_everywhere():
    x, mask = np.full(SHAPE, np.nan), np.zeros(SHAPE)
    for function in (masked_sum, masked_mean, masked_variance):
        assert float(function(x, mask)) == 0
    assert float(masked_variance(x, mask, unbiased=True)) == 0
    np.testing.assert_array_equal(whiten(x, mask), np.zeros(SHAPE))
    np.testing.assert_array_equal(whiten(x, mask, shift_mean=False), np.zeros(SHAPE))


def test_masked_infinities_leave_the_gradient_finite():
    x, mask = jnp.array([[1.0, jnp.inf], [2.0, jnp.nan]]), jnp.array([[1.0, 0.0], [1.0, 0.0]])
    gradient = jax.grad(lambda x: masked_mean(x, mask))(x)
    np.testing.assert_array_equal(gradient, [[0.5, 0], [0.5, 0]])


def test_bad_modes_and_totals_are_refused():
    with pytest.raises(ValueError, match="mode is 'mean'; one of token_mean"):
        aggregate(LOSS, MASK, "mean")
    with pytest.raises(ValueError, match="total is -1"):
        aggregate(LOSS, MASK, total=-1)
    with pytest.raises(ValueError, match="max_length is 0; a number above 0"):
        aggregate(LOSS, MASK, "token_sum_constant", max_length=0)
    with pytest.raises(ValueError, match="max_length has shape"):
        aggregate_total(MASK, "token_sum_constant", max_length=np.array([3, 3]))
    with pytest.raises(ValueError, match="total has shape"):
        aggregate(LOSS, MASK, total=np.array([2.0, 3.0]))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\)"):
        aggregate(LOSS[0], MASK[0])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(AGGREGATIONS))
def test_aggregation_equals_a_loop(seed, mode):
    x, mask = _case(seed)
    tokens, sums, means = 0, [], []
    for row, keep in zip(x.astype(np.float64), mask, strict=True):
        own = [value for value, kept in zip(row, keep, strict=True) if kept]
        tokens += len(own)
        if own:
            sums.append(sum(own))
            means.append(sum(own) / len(own))
    expected = {
        "token_mean": sum(sums) / max(tokens, 1),
        "sequence_mean_token_mean": sum(means) / max(len(sums), 1),
        "sequence_mean_token_sum": sum(sums) / max(len(sums), 1),
        "token_sum_constant": sum(sums) / max(9 * len(sums), 1),
    }
    found = aggregate(np.where(mask, x, np.nan), mask, mode, max_length=9)
    assert float(found) == pytest.approx(expected[mode], rel=1e-5, abs=1e-5)
    count = {"token_mean": tokens, "token_sum_constant": 9 * len(sums)}.get(mode, len(sums))
    assert float(aggregate_total(mask, mode, max_length=9)) == count


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.booleans(), unbiased=st.booleans())
def test_whitening_equals_a_loop(seed, shift, unbiased):
    x, mask = _case(seed)
    own = [float(value) for value, kept in zip(x.ravel(), mask.ravel(), strict=True) if kept]
    expected = np.zeros(SHAPE)
    if len(own) > 1:
        mean = sum(own) / len(own)
        variance = sum((value - mean) ** 2 for value in own) / (len(own) - unbiased)
        expected[mask] = [(value - mean) / np.sqrt(variance + 1e-8) + (0 if shift else mean) for value in own]
    elif own and not shift:
        expected[mask] = own
    found = whiten(np.where(mask, x, np.nan), mask, shift, unbiased)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
