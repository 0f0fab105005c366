"""Held-out rows in `fit` of every trainer: what is measured, when, early stopping, and resuming."""

from __future__ import annotations

import itertools

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import Checks, Optimizer
from jaxalign.data.chat import styles
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.ppo import PPO
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.sft import SFT
from tests import tiny
from tests.trainers.small import EXAMPLES, PAIRS, language_model, tokenizer

FAST = Optimizer(learning_rate=1e-2, schedule="constant")
SFT_FIELDS = {"epochs": 6, "batch_rows": 1, "row_length": 48, "checkpoint_every": 2, "optimizer": FAST}
DPO_FIELDS = {"beta": 0.5, "epochs": 9, "batch": 2, "optimizer": FAST}
FLIPPED = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS[:2]]


def answer_logprobs(params, row: dict, answer: str) -> np.ndarray:
    """The log-probability of each answer token, by the softmax over the vocabulary."""
    model = language_model()
    prompt = model.prompt_ids(row["prompt"])
    ids = np.asarray([*prompt, *styles.encode_answer(tokenizer(), row[answer], "plain")])
    logits = tiny.all_logits(model.model, params, ids[None])[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))
    return np.asarray([logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))], np.float64)


@pytest.mark.slow
def test_the_loss_of_sft_is_the_mean_over_the_answer_tokens_of_the_held_out_rows():
    trainer = SFT(language_model(), **SFT_FIELDS)
    steps = list(trainer.fit(EXAMPLES[:4], EXAMPLES[4:], eval_every=3))
    measured = [step.number + 1 for step in steps if "held_out_loss" in step.metrics]
    assert measured == sorted({*range(3, len(steps) + 1, 3), len(steps)}) and len(measured) > 2
    expected = -np.mean(np.concatenate([answer_logprobs(trainer.policy.params, row, "response") for row in EXAMPLES[4:]]))
    assert steps[-1].metrics["held_out_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.measure_held_out() == {"held_out_loss": pytest.approx(expected, rel=1e-5)}


@pytest.mark.medium
def test_held_out_rows_do_not_change_the_training():
    plain, measured = (SFT(language_model(), **SFT_FIELDS) for _ in range(2))
    expected = list(plain.fit(EXAMPLES[:4]))
    steps = list(measured.fit(EXAMPLES[:4], EXAMPLES[4:]))
    assert [step.metrics["loss"] for step in steps] == [step.metrics["loss"] for step in expected]
    chex.assert_trees_all_equal(tiny.to_host(measured.policy.params), tiny.to_host(plain.policy.params))


@pytest.mark.medium
def test_the_loss_and_the_accuracy_of_dpo_are_those_of_its_formula():
    trainer = DPO(language_model(), **DPO_FIELDS)
    *_, last = trainer.fit(PAIRS[:4], PAIRS[4:])
    params, start = trainer.policy.params, language_model().params
    margins = []
    for row in PAIRS[4:]:
        gains = [answer_logprobs(params, row, side).sum() - answer_logprobs(start, row, side).sum()
                 for side in ("chosen", "rejected")]
        margins.append(0.5 * (gains[0] - gains[1]))
    assert last.metrics["held_out_loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.asarray(margins)))), rel=1e-4)
    assert last.metrics["held_out_accuracy"] == np.mean(np.asarray(margins) > 0)


@pytest.mark.slow
def test_a_reward_model_without_early_stopping_is_measured_too():
    reward = RewardModel(language_model(), members=1, epochs=2, batch=3, normalise=False)
    *_, last = reward.fit(PAIRS[:4], PAIRS[4:])
    prompts = [row["prompt"] for row in PAIRS[4:]]
    gap = reward.score(prompts, [r["chosen"] for r in PAIRS[4:]]) - reward.score(prompts, [r["rejected"] for r in PAIRS[4:]])
    expected = {"held_out_loss": np.mean(np.log1p(np.exp(-gap))), "held_out_accuracy": np.mean(gap > 0)}
    assert reward.measure_held_out() == pytest.approx(expected, rel=1e-5)
    assert {name: last.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
def test_early_stopping_of_dpo_keeps_the_weights_with_the_lowest_loss():
    """The held-out pairs have the opposite labels, so their loss rises as the model learns."""
    trainer = DPO(language_model(), **DPO_FIELDS)
    steps = list(trainer.fit(PAIRS, FLIPPED, eval_every=1, patience=2))
    losses = [step.metrics["held_out_loss"] for step in steps]
    best = int(np.argmin(losses))
    assert len(steps) == best + 3 < 27
    assert trainer.measure_held_out()["held_out_loss"] == pytest.approx(losses[best], rel=1e-6)
    fewer = DPO(language_model(), **DPO_FIELDS)
    list(itertools.islice(fewer.fit(PAIRS), best + 1))
    chex.assert_trees_all_equal(tiny.to_host(trainer.policy.params), tiny.to_host(fewer.policy.params))


@pytest.mark.slow
def test_an_interruption_changes_nothing(tmp_path):
    def run(steps=None, **options):
        trainer = SFT(language_model(), **SFT_FIELDS, **options)
        return trainer, list(itertools.islice(trainer.fit(EXAMPLES[:4], EXAMPLES[4:], eval_every=2, patience=2), steps))

    whole, all_steps = run()
    run(3, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert rest == all_steps[2:]
    chex.assert_trees_all_equal(tiny.to_host(again.policy.params), tiny.to_host(whole.policy.params))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["held_out_loss"] == all_steps[-1].metrics["held_out_loss"]
    with pytest.raises(UserError, match="contains a run with different patience"):
        SFT(language_model(), **SFT_FIELDS, directory=tmp_path).fit(EXAMPLES[:4], EXAMPLES[4:], eval_every=2, patience=3)


@pytest.mark.slow
def test_ppo_with_adapters_measures_the_mean_reward_of_held_out_prompts_and_keeps_the_best():
    """The reward is a constant of each prompt's column, so its mean is known, and no later mean is higher."""
    def worth(prompts, responses, gold, **columns):
        return [float(value) for value in gold]

    fields = {"iterations": 6, "batch": 4, "max_new_tokens": 4, "advantages": "rloo", "group_size": 2,
              "checks": Checks(step_zero=False)}
    trainer = PPO(language_model(lora=True), worth, **fields)
    prompts = [{"prompt": "It", "gold": 1}, {"prompt": "is", "gold": 2}]
    steps = list(trainer.fit(prompts, [{"prompt": text, "gold": i} for i, text in enumerate("abc")], eval_every=1, patience=2))
    assert [step.metrics["held_out_score"] for step in steps] == [1.0] * 3
    other = PPO(language_model(lora=True), worth, **fields)
    next(other.fit(prompts))
    chex.assert_trees_all_equal(tiny.to_host(trainer.policy.params), tiny.to_host(other.policy.params))


@pytest.mark.parametrize(("options", "message"), (
    ({"eval_every": 2}, r"SFT.fit\(eval_every\) is 2, but there are no rows to measure; give the argument held_out too"),
    ({"patience": 1}, r"SFT.fit\(patience\) is 1, but there are no rows"),
    ({"held_out": EXAMPLES, "eval_every": -1}, r"SFT.fit\(eval_every\) is -1; it must be at least 0"),
    ({"held_out": EXAMPLES, "patience": 0}, r"SFT.fit\(patience\) is 0; it must be at least 1"),
    ({"held_out": []}, r"SFT.fit\(held_out\)"),
    ({"held_out": [3]}, r"SFT.fit\(held_out\)"),
))
def test_arguments_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SFT(language_model()).fit(EXAMPLES, **options)


def test_measuring_without_held_out_rows_is_refused():
    with pytest.raises(UserError, match="SFT has no held-out rows to measure; give SFT.fit the argument held_out"):
        SFT(language_model()).measure_held_out()


def test_a_second_fit_starts_from_the_given_model():
    trainer = SFT(language_model(), **SFT_FIELDS | {"epochs": 1})
    assert list(trainer.fit(EXAMPLES[:2])) == list(trainer.fit(EXAMPLES[:2]))
