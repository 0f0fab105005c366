"""PPO as a library object: a Python reward, a directory, interruptions, a mesh, adapters, and invalid arguments."""

from __future__ import annotations

import itertools
import json

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import Checks, Mesh, Optimizer
from jaxalign.errors import UserError
from jaxalign.rl import step_zero
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.ppo import PPO
from tests import tiny
from tests.compilations import SEEN
from tests.trainers.small import PAIRS, language_model

pytestmark = pytest.mark.medium

PROMPTS = [row["prompt"] for row in PAIRS]
FIELDS = {"iterations": 4, "batch": 8, "max_new_tokens": 8, "checkpoint_every": 2, "epochs": 1, "minibatches": 1,
          "missing_eos": "none", "advantages": "rloo", "group_size": 2}


def brief(prompts, responses, **columns):
    return [-len(response) / 10 for response in responses]


def run(steps=None, prompts=PROMPTS, reward=brief, model=None, **options):
    trainer = PPO(model or language_model(), reward=reward, **FIELDS | options)
    return trainer, list(itertools.islice(trainer.fit(prompts), steps))


@pytest.fixture(scope="module")
def whole():
    return run()


def test_a_python_function_is_the_reward_and_the_given_model_is_unchanged(whole):
    trainer, steps = whole
    assert [step.number for step in steps] == [0, 1, 2, 3]
    chex.assert_tree_all_finite([step.metrics for step in steps])
    assert all(-0.8 * 10 <= step.metrics["score"] <= 0 for step in steps)
    assert len(trainer.checks) == 5 and all(check.passed for check in trainer.checks)
    chex.assert_trees_all_equal(language_model().model.init(jax.random.key(0)), language_model().params)
    changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != b), trainer.policy.params, language_model().params)
    assert all(jax.tree.leaves(changed))


def test_a_second_run_with_equal_settings_compiles_nothing(whole):
    count = len(SEEN)
    _, steps = run(steps=2)
    assert SEEN[count:] == [] and [step.metrics for step in steps] == [step.metrics for step in whole[1][:2]]


def test_without_the_checks_of_step_zero_nothing_else_changes(whole, monkeypatch):
    monkeypatch.setattr(step_zero, "step_zero_values", None)  # Not called.
    trainer, steps = run(steps=2, checks=Checks(step_zero=False))
    assert trainer.checks == () and [step.metrics for step in steps] == [step.metrics for step in whole[1][:2]]


@pytest.mark.slow
def test_a_directory_and_an_interruption_change_nothing(whole, tmp_path):
    trainer, steps = whole
    run(steps=3, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert rest[-1].number == 3 and 0 < rest[0].number <= 3
    assert rest == steps[rest[0].number :]
    chex.assert_trees_all_equal(tiny.to_host(again.policy.params), tiny.to_host(trainer.policy.params))
    assert [row["score"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [s.metrics["score"] for s in steps]
    assert [check["passed"] for check in json.loads((tmp_path / "checks.json").read_text())] == [True] * 5


@pytest.mark.slow
def test_columns_reach_the_reward_and_few_prompts_are_repeated():
    seen = []

    def graded(prompts, responses, wanted, **columns):
        seen.append((prompts, wanted))
        return np.arange(len(responses), dtype=float)

    # The prompt is one of the others, so that the shapes and the programs are those of the other runs.
    _, steps = run(steps=1, prompts=[{"prompt": PROMPTS[0], "wanted": "red"}], reward=graded)
    assert seen == [([[{"role": "user", "content": PROMPTS[0]}]] * 8, ["red"] * 8)]
    assert steps[0].metrics["score"] == pytest.approx(3.5)


@pytest.mark.slow
def test_it_runs_on_a_mesh_with_adapters_and_a_shared_critic():
    """Without the checks of step 0, which tests/rl/test_checks.py has."""
    model = language_model(lora=True, mesh=Mesh(fsdp=2, tensor=2, data=2))
    trainer, steps = run(steps=2, model=model, critic="shared", advantages="gae", group_size=1, checks=Checks(step_zero=False))
    chex.assert_tree_all_finite(steps[-1].metrics)
    assert set(trainer.policy.params) == set(model.params)


class PerToken:
    """One point for each token of a response."""

    name = "tokens"

    def score(self, batch):
        return np.ones(batch.rollout.logprobs.shape, np.float32)


DENSE = {"advantages": "reinforce_pp", "group_size": 1, "iterations": 10, "batch": 32, "kl_coef": 0.0, "gamma": 0.0,
         "optimizer": Optimizer(learning_rate=3e-2, schedule="constant"), "temperature": 1.0,
         "checks": Checks(step_zero=False)}


@pytest.mark.slow
def test_scores_per_token_are_summed():
    _, (step,) = run(steps=1, reward=PerToken(), **DENSE)
    assert step.metrics["score"] == pytest.approx(step.metrics["response_length"])


@pytest.mark.parametrize(("options", "message"), [
    ({"kl_coeff": 0.1}, "kl_coeff"), ({"batch": 7}, r"multiple of PPO\.group_size"), ({"prompts": 6}, "PPO.fit"),
    ({"lam": 0.5}, "lam is 0.5, which has no effect"),
    ({"score_clip": 1.0}, "score_clip"), ({"advantages": "no_such_one"}, "no_such_one"), ({"seed": -1}, "seed"),
    ({"reference": "x"}, "reference"), ({"start_critic": 3}, "start_critic"),
])
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PPO(language_model(), reward=brief, **FIELDS | options)


@pytest.mark.parametrize(("prompts", "message"), [
    ([], "empty"), ([3], r"PPO.fit\(prompts\)\[0\]"), (np.zeros((2, 3)), "ndarray"), (["Name " * 200], "tokens"),
    ([{"prompt": "a b", "x": 1}, {"prompt": "a b"}], "same columns"),
])
def test_invalid_prompts_are_refused(prompts, message):
    with pytest.raises(UserError, match=message):
        PPO(language_model(), reward=brief, **FIELDS).fit(prompts)


@pytest.mark.parametrize(("reward", "message"), [
    (lambda prompts, responses, **_: [1.0], "1"), (lambda prompts, responses, **_: [float("nan")] * len(responses), "score"),
])
def test_rewards_that_return_invalid_results_are_refused(reward, message):
    with pytest.raises(UserError, match=message):
        run(steps=1, reward=reward)


def test_a_failed_check_stops_training_if_the_caller_asks_for_it():
    with pytest.raises(UserError, match="sampler_gap"):
        run(steps=1, sampler_tolerance=1e-12, checks=Checks(step_zero=False, sampler_gap="stop"))


@pytest.mark.slow
def test_a_dense_reward_learns():
    """Each even token id is rewarded where it was sampled."""
    def even(prompts, responses, token_ids, ended, raw_responses, **columns):
        assert len(raw_responses) == len(ended) == len(token_ids)
        return [[float(token % 2 == 0) for token in ids] for ids in token_ids]

    _, steps = run(reward=even, **DENSE)
    share = [step.metrics["score"] / step.metrics["response_length"] for step in steps]
    assert share[-1] > share[0] + 0.2
