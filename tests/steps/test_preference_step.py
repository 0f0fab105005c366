"""The preference model's step: the position of its score, and the loss on soft labels."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxalign.records import PairBatch
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.packed import pack_pairs
from jaxalign.steps.preference_step import pair_scores, preference_step, sequence_scores
from jaxalign.steps.state import init_state
from tests import tiny

SGD, CENTERING = optax.sgd(1.0), 0.05
MODEL = tiny.model(head="scalar")


@pytest.fixture(scope="module")
def pairs():
    """8 pairs of unequal lengths; the labels lean both ways, two are even and one row is padding."""
    rng = np.random.default_rng(0)
    label = np.array([0.9, 0.1, 0.5, 0.6, 0.3, 0.5, 1.0, 0.0], np.float32)
    weight = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    length = rng.integers(1, 10, (8, 2)).astype(np.int32)
    return PairBatch(rng.integers(0, 32, (8, 2, 10)).astype(np.int32), length, label, weight)


def step(batch, tokens=None, branches=True):
    """Return (gradient, metrics) of one step; tokens: size of packed micro-batches."""
    packed = None if tokens is None else pack_pairs(batch, tokens, MODEL.sharding, branches=branches)
    state = init_state(MODEL, SGD, tiny.place(MODEL, tiny.host_params("scalar")), jax.random.key(0))
    given = PreferenceArguments(model=MODEL, optimizer=SGD, centering_coef=CENTERING, batch=batch, packed=packed)
    new, metrics = preference_step(state, given)
    return jax.tree.map(np.subtract, tiny.host_params("scalar"), tiny.to_host(new.params)), tiny.to_host(metrics)


def expected_scores(batch):
    params, scores = tiny.host_params("scalar"), np.zeros((8, 2))
    for row, side in np.ndindex(8, 2):
        ids = batch.tokens[row, side, : batch.length[row, side]]
        scores[row, side] = tiny.hidden(MODEL, params, ids)[-1] @ params["score"]
    return scores


@pytest.mark.medium
def test_the_score_is_read_at_the_last_token_given_by_the_length(pairs):
    params, expected = tiny.host_params("scalar"), expected_scores(pairs)
    np.testing.assert_allclose(pair_scores(MODEL, params, pairs), expected, atol=1e-5)
    first = sequence_scores(MODEL, params, pairs.tokens[:, 0], pairs.length[:, 0])
    np.testing.assert_allclose(first, expected[:, 0], atol=1e-5)


def test_loss_and_accuracy_by_hand(pairs):
    scores, label, counted = expected_scores(pairs), pairs.label.astype(np.float64), pairs.weight == 1
    margin = scores[:, 0] - scores[:, 1]
    loss = label * np.log1p(np.exp(-margin)) + (1 - label) * np.log1p(np.exp(margin))
    loss += CENTERING * scores.sum(1) ** 2
    decided = counted & (np.abs(label - 0.5) > 1e-6)
    _, metrics = step(pairs)
    assert metrics.loss == pytest.approx(loss[counted].mean(), rel=1e-5)
    assert metrics.accuracy == pytest.approx(((margin > 0) == (label > 0.5))[decided].mean())


@pytest.mark.parametrize("tokens", [None, 32])
def test_the_accuracy_of_pairs_without_a_preference_is_unknown(pairs, tokens):
    _, metrics = step(dataclasses.replace(pairs, label=np.full(8, 0.5, np.float32)), tokens)
    assert np.isnan(metrics.accuracy) and np.isfinite(metrics.loss)
    assert (metrics.skipped, metrics.grad_norm > 0) == (0, True)


@pytest.mark.medium
def test_a_margin_by_hand(pairs):
    """The better answer must lead by the margin, whichever side the label favours; an array of zeros is no margin."""
    margin = np.linspace(0, 2, 8).astype(np.float32)
    scores, label, counted = expected_scores(pairs), pairs.label.astype(np.float64), pairs.weight == 1
    apart = scores[:, 0] - scores[:, 1]
    loss = label * np.log1p(np.exp(margin - apart)) + (1 - label) * np.log1p(np.exp(margin + apart))
    loss += CENTERING * scores.sum(1) ** 2
    _, metrics = step(dataclasses.replace(pairs, margin=margin))
    assert metrics.loss == pytest.approx(loss[counted].mean(), rel=1e-5)
    _, none = step(pairs)
    _, zeros = step(dataclasses.replace(pairs, margin=np.zeros(8, np.float32)), 20)
    assert zeros.loss == pytest.approx(none.loss, rel=1e-5)


@pytest.mark.parametrize("tokens", [20, 40, 0])
@settings(deadline=None, max_examples=5)
@example([(1, 1, 0)] * 4 + [(1, 2, 1)] + [(1, 1, 0)] * 3)
@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10), st.integers(0, 10)), min_size=8, max_size=8))
def test_packed_micro_batches_change_nothing(pairs, tokens, lengths):
    """Pairs of sequences with two lengths and a shared prefix of the third length, optionally stored once."""
    length, alike = np.split(np.asarray(lengths, np.int32), [2], axis=1)
    both = np.where(np.arange(10) < alike[..., None], pairs.tokens[:, :1], pairs.tokens)
    pairs = dataclasses.replace(pairs, tokens=both, length=length)
    # For equal sequences, or a token and its repetition, rounding would decide which answer is better.
    tied = np.abs(np.diff(expected_scores(pairs), axis=1)[:, 0]) < 1e-5
    pairs = dataclasses.replace(pairs, label=np.where(tied, np.float32(0.5), pairs.label))
    gradient, metrics = step(pairs)
    for branches in (False, True):
        found, found_metrics = step(pairs, tokens, branches)
        chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_close(found, gradient, rtol=1e-4, atol=1e-6)


def test_padding_rows_and_padding_tokens_have_no_gradient(pairs):
    tokens = np.where(np.arange(10) < pairs.length[..., None], pairs.tokens, 31)
    tokens[7] = 5
    label = np.where(pairs.weight == 1, pairs.label, np.nan).astype(np.float32)
    gradient, metrics = step(pairs)
    for width in (0, 6):
        wide = np.pad(tokens, ((0, 0), (0, 0), (0, width)), constant_values=31)
        found, found_metrics = step(dataclasses.replace(pairs, tokens=wide, label=label))
        chex.assert_trees_all_close(found, gradient, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-5, atol=1e-6)
