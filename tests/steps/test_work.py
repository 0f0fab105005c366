"""FLOPs of batches, compared with those of their sequences."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.data.packing import completion, pack
from jaxalign.models import flops
from jaxalign.records import AnswerPairs, PairBatch, Rollout
from jaxalign.rewards.scorer import Ensemble, Scorer, scoring_work
from jaxalign.steps import work
from tests import tiny

MODEL, SCALAR = tiny.model(), tiny.model().with_head("scalar")


def test_packed_documents_cost_the_same_as_separate_documents():
    sizes = [(3, 5), (1, 2), (6, 4), (2, 9)]
    batch, _ = pack([completion([7] * prompt, [9] * answer) for prompt, answer in sizes], 16)
    assert len(batch.tokens) < len(sizes)
    expected = sum(flops.learning(MODEL, [prompt + answer], answer) for prompt, answer in sizes)
    assert work.learning_packed(MODEL, batch) == pytest.approx(expected, rel=1e-12)


def _pairs():
    """Two pairs: answers of 5 and 6 tokens whose first 3 agree, and answers of 4 and 2 that differ from the first token on."""
    tokens = np.zeros((2, 2, 8), np.int32)
    tokens[0, 0, :5], tokens[0, 1, :6] = [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]
    tokens[1, 0, :4], tokens[1, 1, :2] = [4, 4, 4, 4], [5, 4]
    return tokens, np.asarray([[5, 6], [4, 2]], np.int32)


def test_the_shared_prefix_of_a_pair_counts_once():
    tokens, length = _pairs()
    ones = np.ones(2, np.float32)
    pairs = PairBatch(tokens, length, ones, ones)
    expected = flops.learning(SCALAR, [5, 6, 4, 2]) - flops.learning(SCALAR, [3])
    assert work.learning_pairs(SCALAR, pairs) == expected
    answers = AnswerPairs(tokens, np.asarray([[2, 2], [1, 1]]), length, ones, ones, np.zeros((2, 2)))
    expected = flops.learning(MODEL, [5, 6, 4, 2], 3 + 4 + 3 + 1) - flops.learning(MODEL, [3])
    assert work.learning_pairs(MODEL, answers) == expected == 3 * work.reading_pairs(MODEL, answers)


def test_rollouts_are_sampled_read_and_scored():
    zeros = np.zeros((3, 4), np.float32)
    rollout = Rollout(np.zeros((3, 9), np.int32), np.asarray([5, 2, 0]), np.asarray([4, 1, 0]), zeros, np.ones(3, bool))
    assert work.sampled(MODEL, rollout) == (5, flops.forward(MODEL, [9, 3], 5))
    assert work.logprobs(MODEL, rollout) == (12, flops.forward(MODEL, [9, 3], 5))
    assert scoring_work(Scorer(SCALAR), rollout) == (12, flops.forward(SCALAR, [9, 3]))
    two = Scorer(SCALAR, ensemble=Ensemble((0.0, 0.0), (1.0, 1.0), "mean", 0.0))
    assert scoring_work(two, rollout) == (12, 2 * flops.forward(SCALAR, [9, 3]))
