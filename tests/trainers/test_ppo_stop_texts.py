"""`PPO(stop=...)`: responses end at stop texts, in what rewards read and in what PPO trains on."""

from __future__ import annotations

import itertools

import pytest

from jaxalign.config import RewardConfig
from jaxalign.errors import UserError
from jaxalign.rewards.functions import FunctionReward
from jaxalign.trainers.ppo import PPO
from tests.trainers.small import PAIRS, language_model

PROMPTS = [row["prompt"] for row in PAIRS]
FIELDS = {"iterations": 1, "batch": 16, "max_new_tokens": 16, "missing_eos": "none", "advantages": "rloo", "group_size": 2,
          "epochs": 1, "minibatches": 1}


def sampled(stop=(), while_sampling=False, **options):
    """[(text, token ids, ended)] of the responses that the reward received, and the metrics of the iteration."""
    rows = {}

    def reward(prompts, responses, prompt_id, token_ids, ended, raw_responses, **columns):
        rows.update(zip(columns["row"], zip(responses, token_ids, ended, strict=True), strict=True))
        return [float(len(ids)) for ids in token_ids]

    settings = RewardConfig(while_sampling=while_sampling)
    source = FunctionReward("rows", reward, settings, language_model().tokenizer)
    trainer = PPO(language_model(), reward=source, stop=stop, **FIELDS | options)
    asked = [{"prompt": PROMPTS[i % len(PROMPTS)], "row": i} for i in range(8)]
    (step,) = itertools.islice(trainer.fit(asked), 1)
    assert all(check.passed for check in trainer.checks)
    return rows, step.metrics


def _stops(rows):
    """A character in the middle of a response."""
    text = next(text for text, _, _ in rows.values() if len(text) > 4)
    return [text[2]]


@pytest.mark.slow
@pytest.mark.parametrize("while_sampling", (False, True))
def test_rewards_read_the_text_before_the_stop_text_and_the_tokens_that_complete_it(while_sampling):
    whole, _ = sampled(while_sampling=while_sampling)
    stop, decode = _stops(whole), language_model().tokenizer.decode
    cut, metrics = sampled(stop, while_sampling)
    assert cut.keys() == whole.keys()
    shorter = 0
    for row, (text, ids, ended) in cut.items():
        before, all_ids, all_ended = whole[row]
        if stop[0] not in before:
            assert (text, ids, ended) == (before, all_ids, all_ended)
            continue
        shorter += len(ids) < len(all_ids)
        assert text == before[: before.index(stop[0])] and ended
        assert ids == all_ids[: len(ids)] and stop[0] in decode(ids) and stop[0] not in decode(ids[:-1])
    assert shorter
    # Two responses to each prompt, of which the callable saw the last: the lengths are those of the cut tokens.
    assert metrics["score"] == pytest.approx(metrics["response_length"])


@pytest.mark.slow
def test_a_response_that_a_stop_text_ends_counts_as_ended():
    """Every response of a model with random weights has a vowel."""
    _, metrics = sampled(list("aeiou "), missing_eos="replace", missing_eos_value=-7.0)
    _, free = sampled(missing_eos="replace", missing_eos_value=-7.0)
    assert metrics["eos_rate"] > free["eos_rate"] and metrics["response_length"] < free["response_length"]


@pytest.mark.parametrize(("stop", "message"), (
    (".", r"PPO\(stop\) is '.' of type str; a list of texts is expected"),
    ([""], r"PPO\(stop\) has an empty text, which would end every answer at once"),
    ([3], r"PPO\(stop\)\[0\] is 3 of type int; a string is expected"),
))
def test_other_values_are_refused(stop, message):
    with pytest.raises(UserError, match=message):
        PPO(language_model(), reward=len, stop=stop, **FIELDS)


@pytest.mark.slow
def test_a_directory_of_a_run_with_other_stop_texts_is_refused(tmp_path):
    def brief(prompts, responses, **columns):
        return [0.0] * len(responses)

    next(PPO(language_model(), reward=brief, directory=tmp_path, stop=["x"], **FIELDS).fit(PROMPTS))
    with pytest.raises(UserError, match="a run with different stop"):
        PPO(language_model(), reward=brief, directory=tmp_path, stop=["y"], **FIELDS).fit(PROMPTS)
