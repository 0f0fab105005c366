"""A user's rewards: a registered source, a function, scores per token, and everything that can be wrong with them."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Rollout
from jaxalign.rewards.base import RewardBatch, Scored
from jaxalign.rewards.checked import as_reward
from jaxalign.tracking.metrics import read_metrics
from tests.feedback.fakes import WordTokenizer, prompt
from tests.small_run import CONFIG, run

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "reward.py"


def batch(rows=3, tokens=4):
    whole = np.zeros((rows, 8), np.int32) + 20
    lengths = np.full(rows, 2, np.int32)
    rollout = Rollout(whole, lengths, lengths, np.zeros((rows, tokens), np.float32), np.zeros(rows, bool))
    return RewardBatch(rollout, [prompt(i) for i in range(rows)], 0, WordTokenizer())


class Fixed:
    def __init__(self, found):
        self.found = found

    def score(self, batch):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.slow
def test_a_source_named_by_its_module_runs_in_the_stage(done, tmp_path):
    """The source gives scores per token: each token costs 0.1. The sum adds a plain function."""
    for stage in ("pretrain", "revise", "sft"):
        shutil.copytree(done / stage, tmp_path / stage)
    ppo = CONFIG["ppo"] | {"advantages": "rloo", "group_size": 2, "missing_eos": "none"}
    reward = {"source": f"{PLUGIN}:SOURCE+{PLUGIN}:BRIEF", "weights": (2.0, 1.0)}
    run(tmp_path, stages=("pretrain", "revise", "sft", "ppo"), reward=reward, ppo=ppo)
    for row in read_metrics(tmp_path / "ppo" / "metrics.jsonl"):
        assert row["score"] == pytest.approx(-0.2 * row["response_length"] + row["score_brief"], rel=1e-4)


def test_rows_without_a_finite_score_are_dropped():
    scored = as_reward(Fixed([1.0, float("nan"), 2.0]), WordTokenizer()).score(batch())
    assert scored.kept.tolist() == [True, False, True] and scored.scores.tolist() == [1.0, 0.0, 2.0]
    tokens = np.ones((3, 4), np.float32)
    tokens[0, 3] = tokens[1, 0] = np.nan  # After the end of row 0, and within row 1.
    scored = as_reward(Fixed(Scored(tokens)), WordTokenizer()).score(batch())
    assert scored.kept.tolist() == [True, False, True]
    assert scored.scores.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize(("found", "message"), [
    ([1.0, 2.0], r"shape \(2,\) for 3 responses"),
    (np.zeros((3, 5)), r"shape \(3, 5\) for 3 responses"),
    ("abc", "returned str with entries that are not numbers"),
    (Scored([1.0, 2.0, 3.0], [True]), r"kept of shape \(1,\)"),
    ([float("nan")] * 3, "gave no score for 3 of 3 responses"),
    (ValueError("no such row"), r"raised ValueError at .*\.py:\d+: no such row"),
])
def test_an_invalid_result_is_reported_in_one_sentence(found, message):
    with pytest.raises(UserError, match=message):
        as_reward(Fixed(found), WordTokenizer()).score(batch())


@pytest.mark.parametrize(("given", "message"), [
    (3, "of type int; a function"),
    (f"{PLUGIN}:missing", "has no missing"),
    (Fixed, "cannot be created without arguments"),
])
def test_an_invalid_reward_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        as_reward(given, WordTokenizer())


def test_a_function_a_verifier_and_a_name_are_rewards():
    for given in (lambda prompts, responses, **columns: [0.0] * len(responses), "number_match", f"{PLUGIN}:brief"):
        assert as_reward(given, WordTokenizer()).fused() is None
    found = as_reward(f"{PLUGIN}:brief", WordTokenizer()).score(batch())
    assert found.scores.shape == (3,) and (found.scores < 0).all()


def test_a_name_that_is_not_a_source_is_refused():
    with pytest.raises(UserError, match="config.reward.source is 'brevity'"):
        from_config_dict({"reward": {"source": "brevity"}})
    with pytest.raises(UserError, match="a jaxalign RewardSource is expected"):
        from_config_dict({"reward": {"source": f"{PLUGIN}:brief"}})
