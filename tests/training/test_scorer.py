"""The learnt reward: what is normalised, what is clipped, and what padding rows do."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.records import Rollout
from jaxalign.training.scorer import raw_rollout_scores, rollout_scores
from tests import tiny


def sampled():
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(1, 6, 8).astype(np.int32), rng.integers(1, 6, 8).astype(np.int32)
    prompt[7] = response[7] = 0  # a row that fills up the batch
    tokens = rng.integers(0, 32, (8, 12)).astype(np.int32)
    return Rollout(tokens, prompt, response, np.zeros((8, 6), np.float32), np.ones(8, bool))


def test_scores_are_read_at_the_end_of_the_response_normalised_and_clipped():
    """By hand: the head's product with the last hidden state, less .1, over .5, then between -6 and 6."""
    rollout, setup = sampled(), tiny.setup()
    params = tiny.host_params("scalar", seed=5, scale=3.0)
    model, expected = tiny.model(head="scalar"), np.zeros(7)
    for row in range(7):
        ids = rollout.tokens[row, : rollout.prompt_length[row] + rollout.response_length[row]]
        expected[row] = np.asarray(model.hidden(params, ids[None]))[0, -1] @ params["score"]
    scorer = tiny.scorer(setup)
    np.testing.assert_allclose(raw_rollout_scores(scorer, params, rollout)[:7], expected, atol=1e-4)
    normalised = (expected - 0.1) / 0.5
    np.testing.assert_allclose(rollout_scores(scorer, params, rollout)[:7], normalised, atol=2e-4)
    assert (abs(normalised) > 6).any() and (abs(normalised) < 6).any()
    clipped = rollout_scores(dataclasses.replace(scorer, clip=6.0), params, rollout)
    np.testing.assert_allclose(clipped[:7], np.clip(normalised, -6, 6), atol=2e-4)
    assert np.isfinite(clipped).all()
