"""Stage dpo on a file of single judged answers: training rows, reported counts, rejected input."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from jaxalign.config import DPOConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Judgement, Message, Prompt
from jaxalign.stages import dpo
from jaxalign.stages.dpo import balance
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.answers import judged_arrays, separation
from tests.feedback.fakes import WordTokenizer
from tests.small_run import CONFIG, read, run
from tests.tracking.pages import check_links

STAGES = ("pretrain", "dpo", "evaluate", "report")


def judgement(prompt: str, response: str, desirable: bool) -> Judgement:
    return Judgement(Prompt(prompt, (Message("user", prompt),), "human"), response, desirable)


def values(path, **dpo):
    return {
        "stages": STAGES, "data": {"source": "judgements_jsonl", "train": str(path), "held_out_share": 0.25},
        "preference": {"max_length": 192},
        "dpo": {"objective": "kto", "batch": 8, "epochs": 6, "max_length": 192,
                "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0}} | dpo,
    }


def test_a_row_has_the_judged_answer_and_an_answer_to_another_prompt():
    judged = [judgement("one", "a b", True), judgement("one", "c", False), judgement("two", "d e f", True)]
    tokenizer = WordTokenizer()
    found = judged_arrays(tokenizer, judged, "compact", DPOConfig(objective="kto"), single=True)
    np.testing.assert_array_equal(found.label, [1, 0, 1])
    np.testing.assert_array_equal(found.weight, [1, 1, 1])
    alone = judged_arrays(tokenizer, judged, "compact", DPOConfig(objective="kto"))
    np.testing.assert_array_equal(found.tokens[:, 0], alone.tokens[:, 0])

    def answer(i, side):
        return found.tokens[i, side, found.prompt_length[i, side] : found.length[i, side]].tolist()

    # The next answer to another prompt: for both answers to "one" the answer to "two".
    assert answer(0, 1) == answer(1, 1) == answer(2, 0) and answer(2, 1) == answer(0, 0)
    np.testing.assert_array_equal(found.prompt_length[:, 0], found.prompt_length[:, 1])
    with pytest.raises(UserError, match="all answers are to one prompt"):
        judged_arrays(tokenizer, judged[:2], "compact", DPOConfig(objective="kto"), single=True)


@pytest.mark.parametrize(("good", "bad", "weights", "ratio", "warning"), [
    (10, 10, (1.0, 1.0), 1.0, ""),
    (30, 10, (1.0, 1.0), 3.0, ""),
    (40, 10, (1.0, 1.0), 4.0, "set config.dpo.desirable_weight to 0.312"),
    (40, 10, (1.0, 3.0), 4 / 3, ""),
    (1, 10, (1.0, 1.0), 0.1, "set config.dpo.desirable_weight to 12.5"),
    (10, 0, (1.0, 1.0), None, "give answers of both kinds"),
    (0, 10, (1.0, 1.0), 0.0, "give answers of both kinds"),
])
def test_a_warning_when_the_weights_of_good_and_bad_answers_are_far_apart(caplog, good, bad, weights, ratio, warning):
    """The paper recommends a ratio of 1 to 1.5; below half or above twice that range a warning is logged."""
    section = DPOConfig(objective="kto", desirable_weight=weights[0], undesirable_weight=weights[1])
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        found = balance(section, [i < good for i in range(good + bad)], "dpo")
    assert found == {"desirable": good, "undesirable": bad, "ratio": pytest.approx(ratio) if ratio is not None else None}
    messages = [record.getMessage() for record in caplog.records]
    assert (len(messages) == 1 and warning in messages[0]) if warning else not messages


def test_stage_dpo_warns_if_its_reward_is_no_better_than_chance(capsys):
    held_out = {"pairs": 100, "accuracy": 0.49, "low": 0.394, "high": 0.587, "margin": 0.0}
    dpo._warn("round-2/dpo", {"held_out": held_out})
    assert capsys.readouterr().out.startswith("[round-2/dpo] warning: the implicit reward is not reliably better than chance: ")
    dpo._warn("dpo", {"held_out": held_out | {"low": 0.51}})
    assert not capsys.readouterr().out


def test_separation_is_the_share_of_good_answers_above_bad_ones(monkeypatch):
    from jaxalign.trainers import answers as direct

    rewards = np.array([2.0, -1.0, 0.5, 0.5, 3.0], np.float32)
    label = np.array([1, 0, 1, 0, 0], np.float32)
    monkeypatch.setattr(direct, "all_logprobs", lambda *_: np.stack([rewards, rewards], axis=1) + 1)
    judged = direct.AnswerPairs(None, None, None, label, None, np.ones((5, 2), np.float32))
    found = separation(DPOConfig(beta=0.5), None, None, judged)
    # Six comparisons: 2 > -1, 2 > .5, 2 < 3, .5 > -1, .5 = .5 (half), .5 < 3.
    assert found["accuracy"] == pytest.approx(3.5 / 6)
    assert found["margin"] == pytest.approx(0.5 * (1.25 - 2.5 / 3), rel=1e-5)
    assert (found["desirable"], found["undesirable"]) == (2, 3)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dpo": {"objective": "sigmoid", "max_length": 192}},
     "config.dpo.objective is 'sigmoid', which needs pairs.*set dpo.objective to 'kto'"),
    ({"stages": ("pretrain", "preference")}, "stage preference has no data to learn from with .* 'judgements_jsonl'"),
    ({"stages": ("pretrain", "sft", "dpo")}, "stage sft has no data to learn from"),
    ({"data": {"source": "judgements_jsonl"}}, "each row with \"prompt\", \"completion\" and \"label\""),
    ({"data": {"source": "judgements_jsonl", "train": "a", "extra_train": ("b",)}}, "extra_train"),
])
def test_stages_that_need_pairs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(CONFIG | values("a.jsonl") | changes)


@pytest.mark.slow
def test_a_run_learns_which_answers_are_good(tmp_path, capsys):
    """Good and bad answers have different texts; the held-out prompts are new."""
    path = tmp_path / "judged.jsonl"
    rows = [
        {"prompt": f"Question {i} of mine?", "completion": text, "label": good}
        for i in range(24) for text, good in (("It is kind and good.", True), ("You fool, go away.", False))
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"prompt": "x"}\n')
    run(tmp_path / "run", **values(path) | {"data": values(path)["data"] | {"max_bad_share": 0.1}})
    summary = read(tmp_path / "run" / "dpo" / "summary.json")
    assert summary["balance"] == {"desirable": 18, "undesirable": 18, "ratio": 1.0}
    assert summary["data"]["rows"] == 49 and [place["line"] for place in summary["data"]["broken"]] == [49]
    assert summary["train_rows"] == 36 and summary["steps"] == 6 * 36 / 8
    assert (summary["held_out"]["desirable"], summary["held_out"]["undesirable"]) == (6, 6)
    assert summary["held_out"]["accuracy"] == 1.0 and summary["held_out"]["margin"] > 0.1
    metrics = read_metrics(tmp_path / "run" / "dpo" / "metrics.jsonl")
    assert abs(metrics[0]["margin"]) < 1e-3 < metrics[-1]["margin"]
    assert "24 good and 24 bad answers kept" in capsys.readouterr().out
    assert read(tmp_path / "run" / "summary.json")["models"] == ["base", "dpo"]
    assert "Held-out good answers" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert {"changes", "dpo"} <= set(check_links(tmp_path / "run" / "report.html"))
