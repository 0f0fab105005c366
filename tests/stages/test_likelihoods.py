"""The loss on plain text and the accuracy on questions, against log-probabilities from the full softmax."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import jaxalign
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.sources.held_out_texts import read_questions, read_texts
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.stages.shared.likelihoods import LikelihoodMeasures, windows
from tests import made_tokenizers
from tests.folders import write_model

TEXTS = ["the cat sat on the mat " * 12, "say, why?", *(f"the cat sat {i} times" for i in range(9))]
QUESTIONS = [{"prompt": f"say, {i}", "choices": ["the cat", "why?", "the mat sat on the cat"][: 2 + i % 2], "correct": i % 2}
             for i in range(6)]
LENGTH = 64
REWARD = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "reward.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the folder of the base model, the work directory of a run that measures it and a policy)."""
    root = tmp_path_factory.mktemp("likelihoods")
    write_model(root / "model")
    (root / "rl.txt").write_text("".join(f"the cat sat {i} times, why?\n" for i in range(8)))
    (root / "eval.txt").write_text("say, 1\nsay, 2\n")
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (root / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    pipeline.run(from_config_dict(settings(root)), root / "run")
    return root / "model", root / "run"


def settings(root: pathlib.Path) -> dict:
    return {
        "stages": ("ppo", "evaluate", "report"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(root / "model"), "max_length": LENGTH},
        "data": {"source": "prompts_jsonl", "style": "chat", "rl": str(root / "rl.txt"), "eval": str(root / "eval.txt")},
        "reward": {"source": "callable", "callable": f"{REWARD}:brief"},
        "ppo": {"iterations": 1, "batch": 8, "minibatches": 1, "prompts": 8, "max_new_tokens": 8,
                "optimizer": {"learning_rate": 1e-2}},
        "evaluate": {"batch": 8, "max_new_tokens": 8, "win_rate_prompts": 0, "texts": str(root / "texts.jsonl"),
                     "choices": str(root / "choices.jsonl")},
    }


def log_softmax_sum(language_model, prefix, target):
    """The log-probability of `target` after `prefix` from the logits of the whole row, in float64."""
    ids = np.asarray([[*prefix, *target]])
    hidden = language_model.model.hidden(language_model.params, ids)
    logits = np.asarray(language_model.model.logits(language_model.params, hidden), np.float64)[0, len(prefix) - 1 : -1]
    return float((logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))[np.arange(len(target)), list(target)].sum())


def test_the_loss_on_plain_text_is_that_of_the_full_softmax(run):
    folder, workdir = run
    language_model, summary = jaxalign.load_model(folder), json.loads((workdir / "summary.json").read_text())
    total = tokens = 0.0
    for text in TEXTS:
        ids = language_model.tokenizer.encode(text)
        for at in range(1, len(ids), LENGTH - 1):  # The tokenizer has no bos: the first token is context only.
            target = ids[at : at + LENGTH - 1]
            total, tokens = total - log_softmax_sum(language_model, ids[at - 1 : at], target), tokens + len(target)
    assert summary["texts"]["documents"] == len(TEXTS) and summary["texts"]["tokens"] == tokens
    assert summary["text_loss"]["base"] == pytest.approx(total / tokens, rel=1e-5)
    assert summary["text_loss_per_byte"]["base"] == pytest.approx(total / summary["texts"]["bytes"], rel=1e-5)


def test_the_drift_of_the_policy_is_paired_by_document(run):
    summary = json.loads((run[1] / "summary.json").read_text())
    drift = summary["paired"]["ppo"]["text_loss"]
    assert drift["difference"] == pytest.approx(summary["text_loss"]["ppo"] - summary["text_loss"]["base"], rel=1e-6)
    assert drift["low"] <= drift["difference"] <= drift["high"] and drift["cases"] == len(TEXTS)


def test_the_best_choice_has_the_highest_log_probability(run):
    folder, workdir = run
    language_model, summary = jaxalign.load_model(folder), json.loads((workdir / "summary.json").read_text())
    right = {"choices": 0, "choices_per_token": 0}
    for row in QUESTIONS:
        sums, counts = [], []
        for choice in row["choices"]:
            prefix, answer = encoded(language_model, row["prompt"], choice)
            sums.append(log_softmax_sum(language_model, prefix, answer))
            counts.append(len(answer))
        right["choices"] += int(np.argmax(sums)) == row["correct"]
        right["choices_per_token"] += int(np.argmax(np.asarray(sums) / counts)) == row["correct"]
    found = {name: rate["count"] for name, rate in summary["choices"]["base"].items()}
    assert found == right and summary["choices"]["base"]["choices"]["total"] == len(QUESTIONS)


def encoded(language_model, question, choice):
    """The ids of a question in the ChatML template, and of an answer with its end."""
    tokenizer = language_model.tokenizer
    before = tokenizer.encode_template(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    return list(before.ids), [*tokenizer.encode(choice), tokenizer.eos_id]


def test_the_report_shows_both(run):
    page = (run[1] / "report.html").read_text(encoding="utf-8")
    assert "Loss on plain text, nats per token" in page and "Correct choice, log-probability per token" in page


def test_windows_score_every_token_after_the_first_once(tmp_path):
    tokenizer = load_tokenizer(made_tokenizers.qwen(tmp_path / "tokenizer"))
    text, ids = TEXTS[0], tokenizer.encode(TEXTS[0])
    found = windows(tokenizer, text, 10)
    assert [token for window in found for token in window.target] == ids[1:]
    assert all(len(window.prefix) == 1 and len(window.target) <= 9 for window in found)
    joined = [ids[0]]
    for window in found:
        assert window.prefix[0] == joined[-1]
        joined += window.target
    assert joined == ids


@pytest.mark.parametrize(("row", "message"), [
    ({"choices": ["a"], "correct": 0}, "choices is ['a']; a list of two or more different texts"),
    ({"choices": ["a", "a"], "correct": 0}, "two or more different texts"),
    ({"choices": ["a", "b"], "correct": 2}, "correct is 2; the index of one of the 2 choices"),
    ({"choices": ["a", "b"], "correct": True}, "correct is True"),
    ({"correct": 0}, "choices is None")])
def test_a_question_of_another_form_is_refused(tmp_path, row, message):
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps({"prompt": "Why?"} | row) + "\n")
    with pytest.raises(UserError) as error:
        read_questions(path)
    assert message in str(error.value) and "line 1" in str(error.value)


def test_texts_are_rows_or_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    assert read_texts(tmp_path / "a.txt") == ["one", "two"]
    with pytest.raises(UserError, match="b.jsonl:2: the field 'text' is not a text"):
        read_texts(tmp_path / "b.jsonl")


def test_an_answer_that_does_not_fit_is_refused(tmp_path, run):
    folder, _ = run
    (folder.parent / "long.jsonl").write_text(json.dumps({"prompt": "Why?", "choices": ["the cat " * 200, "b"], "correct": 0}))
    changed = settings(folder.parent)
    changed["evaluate"] |= {"choices": str(folder.parent / "long.jsonl")}
    with pytest.raises(UserError, match="config.model.max_length is 64; raise it, or leave the row out"):
        LikelihoodMeasures(from_config_dict(changed), load_tokenizer(folder))
