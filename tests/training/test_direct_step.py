"""Direct preference optimisation: log-probs of answers, and a step that no split, mesh or padding changes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.algorithms.direct_preference import DPO_KINDS
from jaxalign.config import DIRECT_OBJECTIVES, PAIRWISE_OBJECTIVES, Dpo, Optimizer
from jaxalign.records import AnswerPairs
from jaxalign.training.direct_step import answer_logprobs, direct_step
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.state import init_state
from tests import tiny

OPTIMIZER = make_optimizer(Optimizer(learning_rate=1e-2, schedule="constant"), 100)
LABEL = np.asarray([1.0, 0.9, 0.75, 0.6], np.float32)


def pairs(width: int = 12) -> AnswerPairs:
    rng = np.random.default_rng(0)
    tokens = np.zeros((4, 2, width), np.int32)
    prompt, length = rng.integers(1, 4, (4, 2)), rng.integers(5, 12, (4, 2))
    filled = rng.integers(1, 32, (4, 2, 12))
    for i in range(4):
        for side in range(2):
            tokens[i, side, : length[i, side]] = filled[i, side, : length[i, side]]
    reference = rng.normal(-20, 3, (4, 2)).astype(np.float32)
    return AnswerPairs(tokens, prompt.astype(np.int32), length.astype(np.int32), LABEL, np.ones(4, np.float32), reference)


def section(objective: str = "sigmoid", **changes) -> Dpo:
    smoothing = 0.1 if objective in ("conservative", "robust", "exo_pair") else 0.0
    return Dpo(**({"objective": objective, "batch": 4, "label_smoothing": smoothing, "beta": 0.3} | changes))


def step(section: Dpo, batch: AnswerPairs, mesh=None):
    model = tiny.model(mesh)
    state = init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), jax.random.key(0))
    state, metrics = direct_step(model, OPTIMIZER, section, state, tiny.rows(model, batch))
    return tiny.to_host(state.params), {name: float(value) for name, value in metrics.items()}


def test_the_names_of_the_config_are_those_of_the_objectives():
    assert set(PAIRWISE_OBJECTIVES) == set(DPO_KINDS)


def test_answer_logprobs_are_those_of_the_full_softmax():
    model, params, batch = tiny.model(), tiny.host_params(scale=3.0), pairs()
    found = answer_logprobs(model, params, batch)
    for i in range(4):
        for side in range(2):
            start, end = batch.prompt_length[i, side], batch.length[i, side]
            ids = batch.tokens[i, side, :end]
            hidden = model.hidden(params, jnp.asarray(ids[None]))[0]
            logits = np.asarray(hidden @ model.unembedding(params), np.float64)
            expected = sum(
                logits[t - 1, ids[t]] - math.log(np.exp(logits[t - 1]).sum()) for t in range(start, end)
            )
            np.testing.assert_allclose(found.logprobs[i, side], expected, atol=1e-4)
            assert found.tokens[i, side] == end - start


def test_a_policy_that_is_its_own_reference_has_loss_log_2():
    batch = pairs()
    logprobs = np.asarray(answer_logprobs(tiny.model(), tiny.host_params(), batch).logprobs)
    _, metrics = step(section(), dataclasses.replace(batch, reference=logprobs))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["margin"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("objective", [name for name in DIRECT_OBJECTIVES if not name.startswith("aot")])
def test_pitfall_8_micro_batches_change_nothing(objective):
    """Gradients, too, though KTO's KL and BCO's mean reward are taken over the whole batch."""
    batch = pairs()
    if objective == "kto":
        batch = dataclasses.replace(batch, label=np.asarray([1, 0, 1, 0], np.float32))
    whole_params, whole = step(section(objective), batch)
    parts_params, parts = step(section(objective, micro_batches=2), batch)
    assert parts == pytest.approx(whole, rel=2e-4, abs=1e-5)
    tiny.assert_trees_close(parts_params, whole_params, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("objective", ["sigmoid", "orpo", "aot"])
def test_padding_and_rows_that_do_not_count_change_nothing(objective):
    plain_params, plain = step(section(objective), pairs())
    wide_params, wide = step(section(objective), pairs(width=20))
    assert wide == pytest.approx(plain, rel=1e-4, abs=1e-5)
    batch = pairs()
    filled = jax.tree.map(lambda x: np.concatenate([x, x[:4]]), batch)
    filled = dataclasses.replace(filled, weight=np.repeat([1, 0], 4).astype(np.float32))
    filled.reference[4:] = np.nan
    filled_params, padded = step(section(objective, batch=8), filled)
    assert padded == pytest.approx(plain, rel=1e-4, abs=1e-5)
    for params in (wide_params, filled_params):
        tiny.assert_trees_close(params, plain_params, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 2, 1)])
def test_pitfall_21_a_mesh_changes_nothing(mesh):
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), pairs())
    _, alone = step(section(batch=8), batch)
    _, meshed = step(section(batch=8), batch, mesh)
    assert meshed == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_a_sum_of_objectives_is_the_sum_of_their_losses():
    """MPO, arXiv 2411.10442: .8 sigmoid + .2 bco_pair + an SFT term; the anchor of bco is the whole batch's in each part."""
    weights = {"sigmoid": 0.8, "bco_pair": 0.2}
    alone = {name: step(section(name), pairs())[1]["loss"] for name in weights}
    nll = step(section(), pairs())[1]["nll"]
    for micro_batches in (1, 2):
        mixed = section("sigmoid+bco_pair", weights=(0.8, 0.2), sft_weight=0.5, micro_batches=micro_batches)
        expected = sum(weights[name] * alone[name] for name in weights) + 0.5 * nll
        assert step(mixed, pairs())[1]["loss"] == pytest.approx(expected, abs=1e-5)


def test_an_sft_term_adds_the_better_answers_likelihood():
    batch = dataclasses.replace(pairs(), label=np.ones(4, np.float32))
    _, without = step(section(), batch)
    _, with_term = step(section(sft_weight=0.5), batch)
    found = answer_logprobs(tiny.model(), tiny.host_params(), batch)
    nll = -np.mean(np.asarray(found.logprobs)[:, 0] / np.asarray(found.tokens)[:, 0])
    assert with_term["loss"] - without["loss"] == pytest.approx(0.5 * nll, rel=1e-4)


def test_steps_raise_the_better_answer_over_the_worse():
    model = tiny.model()
    batch = dataclasses.replace(pairs(), label=np.ones(4, np.float32))
    start = np.asarray(answer_logprobs(model, tiny.host_params(), batch).logprobs)
    batch = dataclasses.replace(batch, reference=start)
    state = init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), jax.random.key(0))
    for _ in range(10):
        state, metrics = direct_step(model, OPTIMIZER, section(), state, batch)
    assert float(metrics["accuracy"]) == 1 and float(metrics["margin"]) > 0.5
