"""The learnt reward: normalisation, clipping, and padding rows."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxalign.records import Rollout
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Ensemble, Scorer, raw_rollout_scores, rollout_scores, stack_members
from jaxalign.rewards.sums import sum_of_rewards
from jaxalign.steps.offload import FrozenRole
from tests import tiny


def sampled():
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(1, 6, 8).astype(np.int32), rng.integers(1, 6, 8).astype(np.int32)
    prompt[7] = response[7] = 0  # a row that only pads the batch
    tokens = rng.integers(0, 32, (8, 12)).astype(np.int32)
    return Rollout(tokens, prompt, response, np.zeros((8, 6), np.float32), np.ones(8, bool))


@pytest.mark.medium
def test_scores_are_read_at_the_end_of_the_response_then_normalised_and_clipped():
    """By hand: the product of the head and the last hidden state, minus .1, divided by .5, clipped to between -6 and 6."""
    rollout, setup = sampled(), tiny.setup()
    params = tiny.host_params("scalar", seed=5, scale=3.0)
    model, expected = tiny.model(head="scalar"), np.zeros(7)
    for row in range(7):
        ids = rollout.tokens[row, : rollout.prompt_length[row] + rollout.response_length[row]]
        expected[row] = tiny.hidden(model, params, ids)[-1] @ params["score"]
    scorer = tiny.scorer(setup)
    np.testing.assert_allclose(raw_rollout_scores(scorer, params, rollout)[:7], expected, atol=1e-4)
    normalised = (expected - 0.1) / 0.5
    np.testing.assert_allclose(rollout_scores(scorer, params, rollout)[:7], normalised, atol=2e-4)
    assert (abs(normalised) > 6).any() and (abs(normalised) < 6).any()
    clipped = rollout_scores(dataclasses.replace(scorer, clip=6.0), params, rollout)
    np.testing.assert_allclose(clipped[:7], np.clip(normalised, -6, 6), atol=2e-4)
    assert np.isfinite(clipped).all()


def test_a_sum_counts_an_infinite_score_of_a_clipped_reward_model(monkeypatch):
    """Row 1 of the model's raw scores is infinite; clipped to 5, it would be the best response."""
    raw = np.array([0.5, np.inf, -0.5, 9.0], np.float32)
    monkeypatch.setattr("jaxalign.rewards.scorer.raw_rollout_scores", lambda *given: raw)
    reward = LearntReward(Scorer(tiny.model(head="scalar"), clip=5.0), FrozenRole({}))
    batch = types.SimpleNamespace(prompts=[None] * 4, rollout=types.SimpleNamespace(response_length=np.full(4, 2)))
    scored = sum_of_rewards({"preference": reward}, (2.0,)).score(batch)
    assert np.asarray(scored.kept).tolist() == [True, False, True, True]
    assert np.asarray(scored.scores).tolist() == [1.0, 0.0, -1.0, 10.0]


@pytest.mark.parametrize(("how", "mesh"), [("mean", None), ("min", None), ("mean_minus_std", None), ("min", tiny.MESHES[0])])
def test_members_in_one_forward_pass_score_as_they_do_separately(how, mesh):
    """Against a loop over the members with numpy's mean, minimum and standard deviation, on one device and on a mesh of
    eight."""
    rollout, model = sampled(), tiny.model(mesh, head="scalar")
    members = [tiny.host_params("scalar", seed=seed) for seed in (5, 6, 7)]
    shift, scale = (0.1, -0.2, 0.3), (0.5, 1.0, 2.0)
    alone = Scorer(tiny.model(head="scalar"))
    rows = [(np.asarray(raw_rollout_scores(alone, params, rollout)) - a) / b
            for params, a, b in zip(members, shift, scale, strict=True)]
    rows = np.stack(rows).astype(np.float64)
    expected = {"mean": rows.mean(0), "min": rows.min(0), "mean_minus_std": rows.mean(0) - 1.5 * rows.std(0)}[how]
    scorer = Scorer(model, ensemble=Ensemble(shift, scale, how, 1.5))
    stacked = stack_members([tiny.place(model, params) for params in members])
    assert jax.tree.leaves(stacked)[0].shape[0] == 3
    found = raw_rollout_scores(scorer, stacked, tiny.rows(model, rollout))
    np.testing.assert_allclose(found[:7], expected[:7], atol=2e-4)
    normalised = rollout_scores(dataclasses.replace(scorer, shift=0.2, scale=0.5), stacked, tiny.rows(model, rollout))
    np.testing.assert_allclose(normalised[:7], (expected[:7] - 0.2) / 0.5, atol=5e-4)
