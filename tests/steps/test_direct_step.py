"""Direct preference optimisation: log-probs of answers, and a step that is independent of packing, mesh and padding."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.config import DPOConfig, Optimizer
from jaxalign.records import AnswerPairs
from jaxalign.registry.objectives import OBJECTIVES
from jaxalign.steps.arguments import DirectArguments, LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs, direct_step, sorts_the_batch
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.packed import pack_pairs
from jaxalign.steps.state import init_state
from jaxalign.tracking.metrics import by_name
from tests import tiny

OPTIMIZER = make_optimizer(Optimizer(learning_rate=1e-2, schedule="constant"), 100)
LABEL = np.asarray([1.0, 0.9, 0.75, 0.6], np.float32)
SGD = optax.sgd(1.0)  # an update is the gradient


def pairs(width: int = 12, rows: int = 4) -> AnswerPairs:
    rng = np.random.default_rng(0)
    tokens = np.zeros((rows, 2, width), np.int32)
    prompt, length = rng.integers(1, 4, (rows, 2)), rng.integers(5, 12, (rows, 2))
    filled = rng.integers(1, 32, (rows, 2, 12))
    for i in range(rows):
        for side in range(2):
            tokens[i, side, : length[i, side]] = filled[i, side, : length[i, side]]
    reference = rng.normal(-20, 3, (rows, 2)).astype(np.float32)
    label, weight = np.resize(LABEL, rows), np.ones(rows, np.float32)
    return AnswerPairs(tokens, prompt.astype(np.int32), length.astype(np.int32), label, weight, reference)


def judged(batch: AnswerPairs, objective: str) -> AnswerPairs:
    """KTO's rows are single answers, good or bad."""
    if objective != "kto":
        return batch
    return dataclasses.replace(batch, label=np.resize(np.asarray([1, 0, 1, 0], np.float32), len(batch.label)))


def scattered(batch: AnswerPairs, width: int = 20) -> AnswerPairs:
    """The same rows, each followed by an invalid row of garbage, with more padding."""
    rows, _, narrow = batch.tokens.shape

    def twice(x, garbage):
        return np.stack([x, np.full_like(x, garbage)], axis=1).reshape(2 * rows, *x.shape[1:])

    tokens = np.pad(twice(batch.tokens, 31), ((0, 0), (0, 0), (0, width - narrow)), constant_values=30)
    return AnswerPairs(
        tokens, twice(batch.prompt_length, 1), twice(batch.length, narrow), twice(batch.label, np.nan),
        twice(batch.weight, 0), twice(batch.reference, np.nan),
    )


def section(objective: str = "sigmoid", **changes) -> DPOConfig:
    smoothing = 0.1 if objective in ("conservative", "robust", "exo_pair") else 0.0
    return DPOConfig(**({"objective": objective, "batch": 4, "label_smoothing": smoothing, "beta": 0.3} | changes))


def pairs_with_shared_prompts(rows: int = 8, width: int = 24) -> AnswerPairs:
    """Pairs whose two answers share a prompt, with three exceptions: the prompts of the second pair differ from the third token
    on; the third pair is too long for a shared row; the answers of the last pair are equal."""
    rng = np.random.default_rng(1)
    prompt, length = rng.integers(2, 9, rows), rng.integers(10, 14, (rows, 2))
    prompt[2], length[2] = 6, width
    filled = rng.integers(1, 32, (rows, 2, width))
    alike = np.where(np.arange(rows) == 1, 2, prompt)
    filled[:, 1] = np.where(np.arange(width) < alike[:, None], filled[:, 0], filled[:, 1])
    filled[-1, 1], length[-1] = filled[-1, 0], 13
    tokens = np.where(np.arange(width) < length[..., None], filled, 0).astype(np.int32)
    reference = rng.normal(-20, 3, (rows, 2)).astype(np.float32)
    both = np.stack([prompt, prompt], axis=1).astype(np.int32)
    return AnswerPairs(tokens, both, length.astype(np.int32), np.resize(LABEL, rows), np.ones(rows, np.float32), reference)


def step(section: DPOConfig, batch: AnswerPairs, mesh=None, packed=False):
    """Return (gradient, metrics) of one step, with or without packed micro-batches."""
    model = tiny.model(mesh)
    state, parts = init_state(model, SGD, tiny.place(model, tiny.host_params()), jax.random.key(0)), None
    if packed:
        parts = pack_pairs(batch, section.micro_batch_tokens, model.sharding, sorts_the_batch(section), branches=True)
        batch = dataclasses.replace(batch, tokens=None)
    batch = tiny.rows(model, batch)
    given = DirectArguments(model=model, optimizer=SGD, section=section, batch=batch, packed=parts)
    state, metrics = direct_step(state, given)
    gradient = jax.tree.map(np.subtract, tiny.host_params(), tiny.to_host(state.params))
    return gradient, {name: float(value) for name, value in by_name(metrics).items()}


def jitted_step(section: DPOConfig, batch: AnswerPairs, parts=None):
    """`step` on one device, compiled once for all batches of the same shape."""
    state = init_state(tiny.model(), SGD, tiny.place(tiny.model(), tiny.host_params()), jax.random.key(0))
    given = DirectArguments(model=tiny.model(), optimizer=SGD, section=section, batch=batch, packed=parts)
    state, metrics = direct_step(state, given)
    gradient = jax.tree.map(np.subtract, tiny.host_params(), tiny.to_host(state.params))
    return gradient, {name: float(value) for name, value in by_name(metrics).items()}


def assert_same(found, expected) -> None:
    """Equal up to rounding. The largest gradients, hundreds of times the smallest, set the tolerance."""
    (gradient, metrics), (expected_gradient, expected_metrics) = found, expected
    assert metrics == pytest.approx(expected_metrics, rel=2e-4, abs=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_gradient))
    assert largest > 1e-4
    chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-3, atol=2e-6 * max(1, largest))


def test_answer_logprobs_equal_those_of_the_full_softmax():
    model, params, batch = tiny.model(), tiny.host_params(scale=3.0), pairs()
    found = answer_logprobs(LogprobArguments(model=model, params=params, pairs=batch))
    given = LogprobArguments(
        model=model, params=params, pairs=dataclasses.replace(batch, tokens=None), packed=pack_pairs(batch, 24, model.sharding)
    )
    packed = answer_logprobs(given)
    chex.assert_trees_all_close(packed, found, rtol=1e-5, atol=1e-5)
    for i in range(4):
        for side in range(2):
            start, end = batch.prompt_length[i, side], batch.length[i, side]
            ids = batch.tokens[i, side, :end]
            logits = np.asarray(tiny.hidden(model, params, ids) @ model.unembedding(params), np.float64)
            expected = sum(
                logits[t - 1, ids[t]] - math.log(np.exp(logits[t - 1]).sum()) for t in range(start, end)
            )
            np.testing.assert_allclose(found.logprobs[i, side], expected, atol=1e-4)
            assert found.tokens[i, side] == end - start


@pytest.mark.medium
def test_a_policy_that_is_its_own_reference_has_loss_log_2():
    batch = pairs()
    given = LogprobArguments(model=tiny.model(), params=tiny.host_params(), pairs=batch)
    logprobs = np.asarray(answer_logprobs(given).logprobs)
    _, metrics = step(section(), dataclasses.replace(batch, reference=logprobs))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["margin"] == pytest.approx(0, abs=1e-5)


QUADRATIC = ("ipo", "ipo_mean", "sppo_hard")  # Their gradients would hide those of the others in a sum.
LOGISTIC = tuple(
    record.name for record in map(OBJECTIVES.get, OBJECTIVES.names())
    if record.summable and not (record.sorts_the_batch or record.name in QUADRATIC)
)
SORTING = tuple(record.name for record in map(OBJECTIVES.get, OBJECTIVES.names()) if record.sorts_the_batch)
ALONE = tuple(name for name in OBJECTIVES.names() if name not in QUADRATIC + LOGISTIC + SORTING)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["+".join(LOGISTIC), "+".join(QUADRATIC), "+".join(SORTING), *ALONE])
def test_pitfall_08_packed_micro_batches_and_uncounted_rows_change_nothing(objective):
    """The content of padding rows changes nothing either, although KTO's KL and BCO's mean reward cover the whole batch.
    Objectives that can be summed share programs."""
    batch = judged(pairs(), objective)
    # The optimal-transport kinds sort the whole batch and have no micro-batches. Otherwise a micro-batch has a row per answer
    # of a pair.
    tokens = 0 if objective.startswith("aot") else 2 * 20
    smoothing = {"label_smoothing": 0.1} if objective.startswith("+".join(LOGISTIC)) else {}
    found = step(section(objective, batch=8, micro_batch_tokens=tokens, **smoothing), scattered(batch), packed=True)
    assert_same(found, step(section(objective, **smoothing), batch))


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("mesh", "objective"),
    [((2, 2, 2), "kto"), ((8, 1, 1), "aot+bco_pair+ipo_mean"), ((1, 4, 2), "orpo")],
)
def test_pitfall_21_a_mesh_changes_nothing(mesh, objective):
    batch = judged(pairs(width=24, rows=8), objective)  # The shape of the next test, so that they share programs.
    assert_same(step(section(objective, batch=8), batch, mesh, packed=True), step(section(objective, batch=8), batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "objective", "tokens"),
    [((2, 2, 2), "sigmoid+bco_pair", 0), (None, "kto", 0), (None, "orpo", 96), ((4, 1, 2), "sigmoid+bco_pair", 48)],
)
def test_storing_a_shared_prompt_once_changes_nothing(mesh, objective, tokens):
    batch = judged(pairs_with_shared_prompts(), objective)
    found = step(section(objective, batch=8, micro_batch_tokens=tokens), batch, mesh, packed=True)
    assert_same(found, step(section(objective, batch=8), batch))


UP_TO_8 = st.integers(1, 8)
LENGTHS = st.tuples(UP_TO_8, UP_TO_8, UP_TO_8, UP_TO_8, st.integers(0, 16), st.booleans())


@pytest.mark.medium
@settings(deadline=None, max_examples=15)
@given(st.lists(LENGTHS, min_size=6, max_size=6), st.integers(0, 99))
def test_packed_pairs_of_any_length_train_like_separate_answers(lengths, seed):
    """Packed with and without prefix sharing, in parts of 4 rows of 16. BCO's mean reward covers all pairs that count.

    lengths: of both prompts and both answers, length of the shared prefix, and whether the pair counts.
    """
    rng, numbers = np.random.default_rng(seed), np.asarray(lengths)
    prompt, length, alike = numbers[:, :2], numbers[:, :2] + numbers[:, 2:4], numbers[:, 4]
    tokens = rng.integers(0, 32, (6, 2, 16))
    tokens[:, 1] = np.where(np.arange(16) < alike[:, None], tokens[:, 0], tokens[:, 1])
    batch = AnswerPairs(
        tokens.astype(np.int32), prompt.astype(np.int32), length.astype(np.int32), np.resize(LABEL, 6),
        numbers[:, 5].astype(np.float32), rng.normal(-20, 3, (6, 2)).astype(np.float32),
    )
    given = section("sigmoid+bco_pair", batch=6, micro_batch_tokens=64, sft_weight=0.5)
    expected, expected_metrics = jitted_step(given, batch)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for branches in (False, True):
        found, metrics = jitted_step(given, batch, pack_pairs(batch, 64, tiny.model().sharding, branches=branches))
        assert metrics == pytest.approx(expected_metrics, rel=2e-4, abs=1e-5)
        chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=2e-6 * max(1, largest))


@pytest.mark.medium
@pytest.mark.parametrize("objective", ["kto", "sigmoid", "orpo"])
def test_a_batch_without_counted_pairs_has_no_gradient(objective):
    batch = dataclasses.replace(pairs(), weight=np.zeros(4, np.float32), reference=np.full((4, 2), np.nan, np.float32))
    gradient, metrics = step(section(objective), batch)
    assert metrics["loss"] == metrics["anchor"] == metrics["grad_norm"] == metrics["skipped"] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("objective", ["sigmoid", "ipo+apo_zero"])
def test_a_batch_without_a_decided_pair_is_skipped_and_counted(objective):
    tied = dataclasses.replace(pairs(), label=np.full(4, 0.5, np.float32))
    gradient, metrics = step(section(objective), tied)
    assert (metrics["undecided"], metrics["skipped"]) == (1, 0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    one = dataclasses.replace(tied, label=np.array([0.5, 0.5, 1.0, 0.5], np.float32))
    for chosen, batch in ((section(objective), one), (section(sft_weight=0.5), tied)):
        gradient, metrics = step(chosen, batch)
        assert metrics["undecided"] == 0 and any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_a_reference_with_another_vocabulary_is_refused_while_tracing():
    model, other = tiny.model(), tiny.model(vocab=40)
    with pytest.raises(ValueError, match=r"embedding \[V, D\] is \(40, 16\); this model's is \(32, 16\)"):
        jax.eval_shape(answer_logprobs, LogprobArguments(model=model, params=other.abstract(), pairs=pairs()))


@pytest.mark.slow
def test_a_sum_of_objectives_is_the_sum_of_their_losses():
    """MPO, arXiv 2411.10442: .8 sigmoid + .2 bco_pair + an SFT term. In each part the anchor of bco is that of the whole
    batch."""
    weights = {"sigmoid": 0.8, "bco_pair": 0.2}
    alone = {name: step(section(name), pairs())[1]["loss"] for name in weights}
    nll = step(section(), pairs())[1]["nll"]
    mixed = section("sigmoid+bco_pair", weights=(0.8, 0.2), sft_weight=0.5, micro_batch_tokens=24)
    expected = sum(weights[name] * alone[name] for name in weights) + 0.5 * nll
    for packed in (False, True):
        assert step(mixed, pairs(), packed=packed)[1]["loss"] == pytest.approx(expected, abs=1e-5)


def test_the_sft_term_adds_the_nll_of_the_better_answer():
    batch = dataclasses.replace(pairs(), label=np.ones(4, np.float32))
    _, without = step(section(), batch)
    _, with_term = step(section(sft_weight=0.5), batch)
    found = answer_logprobs(LogprobArguments(model=tiny.model(), params=tiny.host_params(), pairs=batch))
    nll = -np.mean(np.asarray(found.logprobs)[:, 0] / np.asarray(found.tokens)[:, 0])
    assert with_term["loss"] - without["loss"] == pytest.approx(0.5 * nll, rel=1e-4)


@pytest.mark.medium
def test_training_raises_the_better_answer_above_the_worse():
    model = tiny.model()
    batch = dataclasses.replace(pairs(), label=np.ones(4, np.float32))
    start = np.asarray(answer_logprobs(LogprobArguments(model=model, params=tiny.host_params(), pairs=batch)).logprobs)
    batch = dataclasses.replace(batch, reference=start)
    state = init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), jax.random.key(0))
    for _ in range(10):
        state, metrics = direct_step(state, DirectArguments(model=model, optimizer=OPTIMIZER, section=section(), batch=batch))
    assert float(metrics.accuracy) == 1 and float(metrics.margin) > 0.5
