"""RewardModel as a library object: training, scores, an ensemble, resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rewards.checked import as_reward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.trainers.reward_model import RewardModel
from tests.trainers.small import PAIRS, language_model, tokenizer

FIELDS = {
    "batch": 3,
    "epochs": 6,
    "max_length": 48,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 0},
}
PROMPTS = [row["prompt"] for row in PAIRS]


def run(steps: int | None = None, **options):
    trainer = RewardModel(language_model(), **(FIELDS | options))
    return trainer, list(itertools.islice(trainer.fit(PAIRS), steps))


@pytest.fixture(scope="module")
def whole():
    return run()


def test_chosen_answers_score_higher(whole):
    trainer, steps = whole
    assert steps[-1].metrics["accuracy"] == 1
    good, bad = (trainer.score(PROMPTS, [row[kind] for row in PAIRS]) for kind in ("chosen", "rejected"))
    assert good.shape == (len(PAIRS),) and good.dtype == np.float32 and np.all(good > bad)
    # Normalised on these very answers: mean 0, standard deviation 1.
    both = np.concatenate([good, bad])
    np.testing.assert_allclose([both.mean(), both.std()], [0, 1], atol=1e-4)


def test_a_directory_and_an_interruption_change_nothing(whole, tmp_path):
    trainer, steps = whole
    run(steps=5, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert rest == steps[rest[0].number :] and rest[0].number > 0
    chosen = [row["chosen"] for row in PAIRS]
    np.testing.assert_array_equal(again.score(PROMPTS, chosen), trainer.score(PROMPTS, chosen))


def test_a_trained_model_can_be_the_reward_of_rl(whole):
    reward = as_reward(whole[0], tokenizer())
    assert isinstance(reward, LearntReward) and reward.fused().scorer == whole[0].scorer[0]


def test_an_ensemble_trains_its_members_in_turn():
    trainer, steps = run(members=2, epochs=2, combine="min")
    assert [step.number for step in steps] == list(range(len(steps))) and len(steps) == 8
    assert trainer.scorer[0].members == 2
    assert np.isfinite(trainer.score(PROMPTS, PROMPTS)).all()


def test_adapters_and_the_head_are_trained():
    trainer = RewardModel(language_model(lora=True), **FIELDS | {"epochs": 1})
    assert np.isfinite([step.metrics["loss"] for step in trainer.fit(PAIRS)]).all()
    assert np.isfinite(trainer.score(PROMPTS[:1], ["Red."])).all()


def test_scores_need_a_trained_model_and_lists_of_equal_length(whole):
    with pytest.raises(UserError, match="RewardModel has not been trained to the end"):
        RewardModel(language_model()).score(["a"], ["b"])
    with pytest.raises(UserError, match="lists of unequal length: prompts has 2, responses has 1"):
        whole[0].score(["a", "b"], ["c"])
