"""The loss on plain text and the accuracy on questions, against log-probabilities from the full softmax."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import jaxalign
from jaxalign.data.sources.asked import read_questions, read_texts
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.likelihoods import LikelihoodMeasures, windows
from tests import made_tokenizers
from tests.finished_run import write_run

pytestmark = pytest.mark.medium

TEXTS = ["the cat sat on the mat " * 24, "say, why?", *(f"the cat sat {i} times" for i in range(9))]
QUESTIONS = [{"prompt": f"say, {i}", "choices": ["the cat", "why?", "the mat sat on the cat"][: 2 + i % 2], "correct": i % 2}
             for i in range(6)]
LENGTH = 96


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the config of a run without a stage evaluate, the folder of its base model)."""
    root = tmp_path_factory.mktemp("likelihoods")
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (root / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    _, config = write_run(root, rows=8, evaluate={
        "batch": 8, "texts": str(root / "texts.jsonl"), "choices": str(root / "choices.jsonl")})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, max_length=LENGTH)), root / "base"


@pytest.fixture(scope="module")
def summary(run):
    """The measures of the base and of the weights of stage sft."""
    config, folder = run
    workdir, tokenizer = folder.parent / "runs" / "tiny", load_tokenizer(folder)
    (workdir / "evaluate").mkdir()
    context = StageContext(config, workdir, workdir / "evaluate", False)
    model = run_models.make_model(config, tokenizer.vocab_size)
    return LikelihoodMeasures(config, tokenizer).summary(context, model, ("base", "sft"))


@functools.partial(jax.jit, static_argnames=("model",))
def all_logits(model, params, ids):
    return model.logits(params, model.hidden(params, ids))


def log_softmax_sum(language_model, prefix, target):
    """The log-probability of `target` after `prefix` from the logits of the whole row, in float64."""
    ids = np.zeros((1, LENGTH), np.int32)
    ids[0, : len(prefix) + len(target)] = [*prefix, *target]
    logits = np.asarray(all_logits(language_model.model, language_model.params, ids), np.float64)[0]
    logits = logits[len(prefix) - 1 : len(prefix) - 1 + len(target)]
    return float((logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))[np.arange(len(target)), list(target)].sum())


def test_the_loss_on_plain_text_is_that_of_the_full_softmax(run, summary):
    language_model = jaxalign.load_model(run[1])
    total = tokens = 0.0
    for text in TEXTS:
        ids = language_model.tokenizer.encode(text)
        for at in range(1, len(ids), LENGTH - 1):  # The tokenizer has no bos: the first token is context only.
            target = ids[at : at + LENGTH - 1]
            total, tokens = total - log_softmax_sum(language_model, ids[at - 1 : at], target), tokens + len(target)
    assert summary["texts"]["documents"] == len(TEXTS) and summary["texts"]["tokens"] == tokens
    first = sum(len(language_model.tokenizer.decode(language_model.tokenizer.encode(text)[:1])) for text in TEXTS)
    assert summary["texts"]["bytes"] == sum(map(len, TEXTS)) - first
    assert summary["text_loss"]["base"] == pytest.approx(total / tokens, rel=1e-5)
    assert summary["text_loss_per_byte"]["base"] == pytest.approx(total / summary["texts"]["bytes"], rel=1e-5)


def test_the_drift_of_a_policy_is_paired_by_document(summary):
    drift = summary["paired"]["sft"]["text_loss"]
    assert drift["difference"] == pytest.approx(summary["text_loss"]["sft"] - summary["text_loss"]["base"], rel=1e-6)
    assert drift["low"] < drift["difference"] < drift["high"] and drift["cases"] == len(TEXTS)


def test_the_best_choice_has_the_highest_log_probability(run, summary):
    language_model, right = jaxalign.load_model(run[1]), {"choices": 0, "choices_per_token": 0}
    for row in QUESTIONS:
        answers = [encoded(language_model, row["prompt"], choice) for choice in row["choices"]]
        sums = np.asarray([log_softmax_sum(language_model, *answer) for answer in answers])
        right["choices"] += int(np.argmax(sums)) == row["correct"]
        right["choices_per_token"] += int(np.argmax(sums / [len(answer) for _, answer in answers])) == row["correct"]
    found = summary["choices"]["base"]
    assert {name: rate["count"] for name, rate in found.items()} == right and right["choices"] != right["choices_per_token"]
    assert {rate["total"] for rate in found.values()} == {len(QUESTIONS)}
    assert {"text_loss", *found} == set(summary["paired"]["sft"])


def encoded(language_model, question, choice):
    """The ids of a question in the ChatML template, and of an answer with its end."""
    tokenizer = language_model.tokenizer
    before = tokenizer.encode_template(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    return list(before.ids), [*tokenizer.encode(choice), tokenizer.eos_id]


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
    config, folder = run
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "Why?", "choices": ["the cat " * 300, "b"], "correct": 0}))
    section = dataclasses.replace(config.evaluate, texts="", choices=str(tmp_path / "long.jsonl"))
    with pytest.raises(UserError, match="config.model.max_length is 96; raise it, or leave the row out"):
        LikelihoodMeasures(dataclasses.replace(config, evaluate=section), load_tokenizer(folder))
