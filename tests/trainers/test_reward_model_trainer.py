"""RewardModel as a library object: training, scores, an ensemble, resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rewards.checked import as_reward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.rows import as_pairs
from jaxalign.trainers.scoring import all_scores
from tests.compilations import SEEN
from tests.trainers.small import PAIRS, language_model, tokenizer

pytestmark = pytest.mark.medium

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


@pytest.mark.slow
def test_chosen_answers_score_higher(whole):
    trainer, steps = whole
    assert steps[-1].metrics["accuracy"] == 1
    good, bad = (trainer.score(PROMPTS, [row[kind] for row in PAIRS]) for kind in ("chosen", "rejected"))
    assert good.shape == (len(PAIRS),) and good.dtype == np.float32 and np.all(good > bad)
    # Normalised on these very answers: mean 0, standard deviation 1.
    both = np.concatenate([good, bad])
    np.testing.assert_allclose([both.mean(), both.std()], [0, 1], atol=1e-4)


@pytest.mark.slow
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


def test_an_ensemble_trains_its_members_in_turn_with_one_program():
    count = len(SEEN)
    trainer, steps = run(members=2, epochs=2, combine="min")
    assert [function for function, _ in SEEN[count:]].count("jit(preference_step)") <= 1  # 0 after `whole`
    assert [step.number for step in steps] == list(range(len(steps))) and len(steps) == 8
    assert trainer.scorer[0].members == 2
    assert np.isfinite(trainer.score(PROMPTS, PROMPTS)).all()


@pytest.mark.slow
def test_adapters_and_the_head_are_trained():
    trainer = RewardModel(language_model(lora=True), **FIELDS | {"epochs": 1})
    assert np.isfinite([step.metrics["loss"] for step in trainer.fit(PAIRS)]).all()
    assert np.isfinite(trainer.score(PROMPTS[:1], ["Red."])).all()


def test_scores_need_a_trained_model_and_lists_of_equal_length(whole):
    with pytest.raises(UserError, match="RewardModel has not been trained to the end"):
        RewardModel(language_model()).score(["a"], ["b"])
    with pytest.raises(UserError, match="lists of unequal length: prompts has 2, responses has 1"):
        whole[0].score(["a", "b"], ["c"])


STOPPING = {"members": 1, "early_stopping": True, "eval_every": 2, "patience": 2, "checkpoint_every": 3, "epochs": 12}
FLIPPED = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]


def stopped_run(steps: int | None = None, held_out=FLIPPED, **options):
    trainer = RewardModel(language_model(), **(FIELDS | STOPPING | options))
    return trainer, list(itertools.islice(trainer.fit(PAIRS, held_out), steps))


@pytest.fixture(scope="module")
def stopped():
    return stopped_run()


def test_early_stopping_keeps_the_weights_with_the_lowest_held_out_loss(stopped):
    """On held-out pairs with the opposite labels, the loss rises as soon as the model learns."""
    trainer, steps = stopped
    losses = {step.number + 1: step.metrics["held_out_loss"] for step in steps if "held_out_loss" in step.metrics}
    assert sorted(losses) == list(range(2, len(steps) + 1, 2))
    best = min(losses, key=losses.get)
    assert len(steps) == best + 4 < 24  # Two evaluations without a lower loss.
    scorer, params = trainer.scorer
    scores = all_scores(scorer, params, trainer._arrays(as_pairs(FLIPPED, "")), 3)
    gap = scores[:, 0] - scores[:, 1]
    assert np.mean(np.log1p(np.exp(-gap))) == pytest.approx(losses[best], rel=1e-5)


@pytest.mark.slow
def test_early_stopping_trains_to_the_end_while_the_loss_falls():
    trainer, steps = stopped_run(held_out=PAIRS, epochs=2)
    plain, all_steps = run(members=1, epochs=2)
    assert len(steps) == len(all_steps) == 4
    np.testing.assert_array_equal(trainer.score(PROMPTS, PROMPTS), plain.score(PROMPTS, PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("steps", (5, None))
def test_an_interruption_of_early_stopping_changes_nothing(steps, stopped, tmp_path):
    """5: after a checkpoint and an evaluation that followed it. None: the run is complete, and its last step was decided by the
    patience."""
    whole, all_steps = stopped
    stopped_run(steps=steps, directory=tmp_path)
    again, rest = stopped_run(directory=tmp_path)
    assert [step.number for step in rest] == list(range(len(all_steps) if steps is None else 3, len(all_steps)))
    assert rest == all_steps[len(all_steps) - len(rest) :]
    np.testing.assert_array_equal(again.score(PROMPTS, PROMPTS), whole.score(PROMPTS, PROMPTS))


def test_without_held_out_pairs_early_stopping_holds_out_dialogues():
    trainer, steps = stopped_run(held_out=None, held_out_share=0.5, epochs=1)
    assert len(steps) == 1 and "held_out_loss" in steps[0].metrics  # 3 of 6 pairs, in batches of 3.
    assert trainer.state.params is not None


def test_options_that_nothing_reads_are_refused():
    with pytest.raises(UserError, match=r"RewardModel\(on_failure\) is 'stop', but only stage preference reads it"):
        RewardModel(language_model(), on_failure="stop")
    undecided = [{**row, "label": 0.5} for row in PAIRS]
    with pytest.raises(UserError, match="none of the held-out pairs .* has a label that prefers an answer"):
        list(RewardModel(language_model(), early_stopping=True).fit(PAIRS, undecided))


@pytest.mark.slow
def test_a_pair_of_weight_0_is_not_learnt():
    """Half of the pairs has the opposite label; the half with weight 0 has no effect."""
    rows = [{**row, "weight": 1.0} for row in PAIRS] + [{**row, "weight": 0.0} for row in FLIPPED]
    trainer = RewardModel(language_model(), **FIELDS)
    assert list(trainer.fit(rows))[-1].metrics["accuracy"] == 1
    good, bad = (trainer.score(PROMPTS, [row[kind] for row in PAIRS]) for kind in ("chosen", "rejected"))
    assert np.all(good > bad)


def test_pairs_that_are_equal_after_the_cut_are_refused_and_cut_sequences_are_counted():
    """A sequence loses its oldest tokens."""
    same = " It is red." * 60
    rows = [PAIRS[0], {"prompt": "Why?", "chosen": "Yes." + same, "rejected": "No." + same}]
    with pytest.raises(UserError, match=r"1 of 2 pairs differ only in tokens that are cut, since max_length is 48.*: 1\)"):
        RewardModel(language_model(), **FIELDS).fit(rows)
    trainer = RewardModel(language_model(), **FIELDS)
    next(trainer.fit([*PAIRS, {"prompt": "Why?", "chosen": "Yes." + same, "rejected": "No."}]))
    assert trainer.cut == 1


@pytest.mark.parametrize("rows", [
    [row | {"label": 0.5} for row in PAIRS], [row | {"label": 0.5} for row in PAIRS] + [PAIRS[0] | {"weight": 0}]])
def test_pairs_without_a_preference_are_refused(rows):
    with pytest.raises(UserError, match=r"RewardModel.fit\(pairs\): no pair with a weight above 0 has a label that prefers an "
                                        "answer, so there is nothing to learn; give some pairs a label other than 0.5"):
        RewardModel(language_model(), **FIELDS).fit(rows)


def test_pairs_without_a_weight_are_refused():
    with pytest.raises(UserError, match=r"RewardModel.fit\(pairs\): every pair has the weight 0, so there is nothing to learn"):
        RewardModel(language_model(), **FIELDS).fit([row | {"weight": 0} for row in PAIRS])
