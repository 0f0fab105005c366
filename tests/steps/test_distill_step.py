"""The distillation step: both objectives by hand, and the same result with micro-batches."""

from __future__ import annotations

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.records import ScoredPairs
from jaxalign.steps.arguments import DistillArguments
from jaxalign.steps.preference_step import distill_step, pair_scores
from jaxalign.steps.state import init_state
from tests import tiny

SGD, SCALE, MODEL = optax.sgd(1.0), 1.7, tiny.model(head="scalar")


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    length, tokens = rng.integers(1, 10, (8, 2)).astype(np.int32), rng.integers(0, 32, (8, 2, 10)).astype(np.int32)
    return ScoredPairs(tokens, length, rng.standard_normal((8, 2)).astype(np.float32))


def step(batch, objective, micro_batches=1):
    state = init_state(MODEL, SGD, tiny.place(MODEL, tiny.host_params("scalar")), jax.random.key(0))
    given = DistillArguments(
        model=MODEL, optimizer=SGD, objective=objective, scale=SCALE, micro_batches=micro_batches, batch=batch
    )
    new, metrics = distill_step(state, given)
    return jax.tree.map(np.subtract, tiny.host_params("scalar"), tiny.to_host(new.params)), tiny.to_host(metrics)


@pytest.mark.medium
def test_the_losses_by_hand(batch):
    """The mean square over both sides, the cross-entropy with the teacher's probability, and the sum of both."""
    scores, target = np.asarray(pair_scores(MODEL, tiny.host_params("scalar"), batch)).astype(np.float64), batch.target
    regression = ((scores - target) ** 2).mean()
    margin, label = SCALE * (scores[:, 0] - scores[:, 1]), 1 / (1 + np.exp(-SCALE * (target[:, 0] - target[:, 1])))
    pairs = (label * np.log1p(np.exp(-margin)) + (1 - label) * np.log1p(np.exp(margin))).mean()
    found = {objective: step(batch, objective)[1] for objective in ("regression", "pairs", "both")}
    expected = {"regression": regression, "pairs": pairs, "both": regression + pairs}
    assert {name: row.loss for name, row in found.items()} == pytest.approx(expected, rel=1e-4)
    alike = np.mean((scores[:, 0] > scores[:, 1]) == (target[:, 0] > target[:, 1]))
    assert found["both"].agreement == pytest.approx(alike)


@pytest.mark.parametrize("objective", ["regression", "pairs"])
def test_micro_batches_change_nothing(batch, objective):
    gradient, metrics = step(batch, objective)
    found, found_metrics = step(batch, objective, 4)
    chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(found, gradient, rtol=1e-4, atol=1e-6)


def test_a_student_that_scores_like_its_teacher_has_no_gradient(batch):
    target = np.asarray(pair_scores(MODEL, tiny.host_params("scalar"), batch))
    for objective in ("regression", "pairs"):
        gradient, metrics = step(ScoredPairs(batch.tokens, batch.length, target), objective)
        assert metrics.agreement == 1 and metrics.grad_norm < 1e-4
        assert all(abs(leaf).max() < 1e-4 for leaf in jax.tree.leaves(gradient))
