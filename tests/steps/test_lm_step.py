"""Next-token training: the loss computed in numpy, and changes that must not affect it."""

from __future__ import annotations

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.config import Optimizer
from jaxalign.data.packing import pack
from jaxalign.models.architecture import Experts
from jaxalign.records import PackedBatch
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_evaluate, lm_loss, lm_step
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import init_state
from tests import tiny

SGD = optax.sgd(1.0)  # an update is the gradient
RNG = np.random.default_rng(0)
DOCUMENTS = [(RNG.integers(0, 32, n).tolist(), RNG.choice([0.0, 0.5, 1.0], n).tolist()) for n in (5, 9, 3, 12, 7, 4, 8)]


def step(batch, micro_batches=1, optimizer=SGD, model=None):
    """(loss, gradient, metrics) of one step on packed rows."""
    model = model or tiny.model()
    state = init_state(model, optimizer, tiny.place(model, tiny.host_params()), jax.random.key(0))
    given = LmArguments(model=model, optimizer=optimizer, micro_batches=micro_batches, batch=tiny.rows(model, batch))
    new, metrics = lm_step(state, given)
    gradient = jax.tree.map(np.subtract, tiny.host_params(), tiny.to_host(new.params))
    return float(metrics.loss), gradient, tiny.to_host(metrics)


def padded(batch: PackedBatch, R: int, T: int) -> PackedBatch:
    return jax.tree.map(lambda x: np.pad(x, ((0, R - len(x)), (0, T - x.shape[1]))), batch)


@pytest.fixture(scope="module")
def packed():
    return pack(DOCUMENTS, 24)[0]


@pytest.fixture(scope="module")
def whole(packed):
    """The batch of four rows, some of them empty, that every test compares with."""
    return padded(packed, 4, 24)


@pytest.mark.medium
def test_the_loss_is_the_weighted_mean_over_all_documents(whole):
    total = weight = 0.0
    model, params = tiny.model(), tiny.host_params()
    for ids, weights in DOCUMENTS:
        logits = tiny.hidden(model, params, ids).astype(np.float64) @ params["embedding"].T
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for t in range(1, len(ids)):
            total, weight = total - weights[t] * logp[t - 1, ids[t]], weight + weights[t]
    loss, _, metrics = step(whole)
    assert loss == pytest.approx(total / weight, rel=1e-5)
    assert metrics.tokens == sum(len(ids) for ids, _ in DOCUMENTS)
    summed, tokens = lm_evaluate(model, params, whole)
    assert (float(summed), float(tokens)) == (pytest.approx(total, rel=1e-5), weight)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_change_nothing(whole, micro_batches):
    """The rows hold unequal numbers of tokens, and one row has none: a mean of means would differ."""
    loss, gradient, _ = step(whole)
    found_loss, found, _ = step(whole, micro_batches)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    chex.assert_trees_all_close(found, gradient, rtol=1e-4, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def summed(model, params, batch):
    """Return (negative log-likelihood, gradient), summed and not averaged."""
    return jax.value_and_grad(lambda params: lm_loss(model, params, batch, 1.0)[0])(params)


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.sampled_from([12, 17, 24]), st.integers(0, 99))
def test_packed_documents_train_like_separate_documents(mesh, lengths, row_length, seed):
    """Documents of 1 to 12 tokens in 8 rows of 24, with padding after `row_length`, against one document per row."""
    rng, model, params = np.random.default_rng(seed), tiny.model(mesh), tiny.host_params()
    documents = [(rng.integers(0, 32, n).tolist(), rng.choice([0.0, 0.5, 1.0], n).tolist()) for n in lengths]
    total, gradient = 0.0, jax.tree.map(np.zeros_like, params)
    for ids, weights in documents:
        one = PackedBatch(*(np.asarray([x]) for x in (ids, [1] * len(ids), range(len(ids)), weights)))
        loss, of_one = summed(tiny.model(), params, padded(one, 1, 12))
        total, gradient = total + loss, jax.tree.map(np.add, gradient, of_one)
    rows = tiny.rows(model, padded(pack(documents, row_length)[0], 8, 24))
    loss, found = summed(model, tiny.place(model, params), rows)
    assert float(loss) == pytest.approx(float(total), rel=1e-5, abs=1e-5)
    # Sums of up to 84 tokens reach 10, so that entries near 0 differ by the rounding of larger terms.
    chex.assert_trees_all_close(tiny.to_host(found), gradient, rtol=1e-4, atol=1e-4)


def test_tokens_without_weight_do_not_affect_the_loss(whole):
    """Different tokens where the mask is 0 and no token of the document follows leave the loss unchanged."""
    changed = whole.tokens.copy()
    changed[whole.segment_ids == 0] = 31
    assert step(type(whole)(changed, *jax.tree.leaves(whole)[1:]))[0] == step(whole)[0]


@pytest.mark.medium
def test_the_loss_falls(packed):
    model, optimizer = tiny.model(), make_optimizer(Optimizer(learning_rate=1e-2), 40)
    state = init_state(model, optimizer, tiny.place(model, tiny.host_params()), jax.random.key(0))
    losses = []
    for _ in range(40):
        state, metrics = lm_step(state, LmArguments(model=model, optimizer=optimizer, batch=packed))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * losses[0] and int(state.step) == 40


@pytest.mark.slow
def test_the_balance_coefficient_evens_out_the_load_of_experts():
    """With the coefficient the load-balancing loss falls to its minimum, the number of experts per token; without it, it does
    not."""
    model = tiny.model(experts=Experts(4, 2))
    tokens = np.minimum(RNG.geometric(0.2, (8, 16)), 31).astype(np.int32)  # Some are frequent, as words in text are.
    ones = np.ones_like(tokens)
    batch = PackedBatch(tokens, ones, np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape), ones.astype(np.float32))
    optimizer = make_optimizer(Optimizer(learning_rate=1e-2, schedule="constant"), 40)
    last = {}
    for coef in (0.0, 1.0):
        state = init_state(model, optimizer, model.init(jax.random.key(0)), jax.random.key(1))
        for _ in range(40):
            given = LmArguments(model=model, optimizer=optimizer, micro_batches=2, batch=batch, balance_coef=coef)
            state, metrics = lm_step(state, given)
        last[coef] = float(metrics.load_balance)
    assert last[0.0] > last[1.0] + 0.05
    assert last[1.0] == pytest.approx(2.0, abs=0.02)
