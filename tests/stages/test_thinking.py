"""data.thinking and feedback.thinking set enable_thinking of a chat template like that of Qwen3, in every prompt."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.config import FeedbackConfig, from_config_dict
from jaxalign.data.chat import styles
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.local import make_writer
from jaxalign.models.language_model import load_model
from jaxalign.pipeline import run
from jaxalign.records import Message, Principle
from jaxalign.stages.shared import judges, run_models
from jaxalign.stages.shared.base import StageContext
from tests import made_tokenizers
from tests.folders import write_model

ASK = (Message("user", "Why?"),)
BEGIN = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("thinking")
    write_model(root / "qwen3", made_tokenizers.QWEN3)
    write_model(root / "plain")

    def answered(i, answer):
        return [{"role": "user", "content": f"Why {i}?"}, {"role": "assistant", "content": answer}]

    pairs = [{"chosen": answered(i, "It is 4."), "rejected": answered(i, "No.")} for i in range(8)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (root / "red.txt").write_text("Why?\nWho?\n")
    return root


def config(folder, thinking="auto", model="qwen3", style="auto", **changes):
    return from_config_dict({
        "stages": ("sft",), "compile_cache": None, "sft": {"required_rows": 0, "row_length": 64, "epochs": 1},
        "model": {"source": "huggingface", "path": str(folder / model), "max_length": 128}, "preference": {"max_length": 128},
        "data": {"source": "preferences_jsonl", "train": str(folder / "pairs.jsonl"), "thinking": thinking, "style": style},
    } | changes)


def encoded(tokenizer, text):
    return tokenizer.encode_template(text, continues=False).ids


@pytest.mark.parametrize(("thinking", "ending"), [("auto", ""), ("on", ""), ("off", NO_THOUGHTS)])
def test_the_prompts_of_a_run_end_as_the_template_writes_them(folder, thinking, ending):
    made = resolve_auto(config(folder, thinking))
    tokenizer = run_models.load_tokenizer(StageContext(made, folder / "run", folder / "run" / "sft", False))
    assert styles.encode_prompt(tokenizer, ASK, "chat") == encoded(tokenizer, BEGIN + ending)
    # The prompt and the answer are the dialogue as the template writes it, so thoughts that the prompt ends are not trained on.
    ids, weights = styles.encode_completion(tokenizer, ASK, "It is 4.", "chat")
    assert list(ids) == encoded(tokenizer, f"{BEGIN}{NO_THOUGHTS}It is 4.<|im_end|>")
    trained = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert trained.replace("\n", "") == ("It is 4." if thinking == "off" else "<think></think>It is 4.")


@pytest.mark.medium
def test_a_model_that_is_loaded_from_a_run_keeps_its_setting(folder, tmp_path):
    run(config(folder, "off"), tmp_path)
    model = load_model(tmp_path / "sft")
    assert styles.encode_prompt(model.tokenizer, ASK, "chat") == encoded(model.tokenizer, BEGIN + NO_THOUGHTS)
    on_top = config(folder, model=str(tmp_path / "sft"))
    assert resolve_auto(on_top).data.thinking == "off"
    assert resolve_auto(config(folder, "on", model=str(tmp_path / "sft"))).data.thinking == "on"


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "plain", "thinking": "off"}, r"data\.thinking is 'off', but the chat template of .* does not read enable_think"),
    ({"style": "hh", "thinking": "on"}, "data.thinking is 'on', but config.data.style is 'hh', which uses no chat template"),
    ({"feedback": {"thinking": "off"}}, "feedback.thinking is 'off', but no stage asks a local judge for a critique"),
])
def test_a_setting_without_an_effect_is_refused(folder, changes, message):
    with pytest.raises(UserError, match=message):
        resolve_auto(config(folder, **changes))


@pytest.mark.parametrize(("model", "templates", "message"), [
    ("plain", "chat", "feedback.thinking is 'off', but the judge in .* has no chat template that reads enable_thinking"),
    ("qwen3", "transcript", "feedback.thinking is 'off', but the template set 'transcript' does not use the judge's chat"),
])
def test_a_judge_whose_template_does_not_read_the_setting_is_refused_before_the_run(folder, model, templates, message):
    data = {"source": "prompts_jsonl", "red_team": str(folder / "red.txt")}
    made = config(folder, model=model, data=data, stages=("revise",), feedback={"thinking": "off", "templates": templates})
    with pytest.raises(UserError, match=message):
        judges.feedback_files(resolve_auto(made), "revise")


@pytest.mark.parametrize(("thinking", "text_ends", "verdict_ends"), [
    ("auto", False, True), ("on", False, True), ("off", True, True),
])
def test_the_judge_has_its_own_setting_and_never_thinks_before_a_verdict(folder, thinking, text_ends, verdict_ends):
    policy = load_tokenizer(folder / "qwen3").with_variables({"enable_thinking": False})
    writer = make_writer(policy, dataclasses.replace(FeedbackConfig(), thinking=thinking, templates="chat"), 4000)
    rule = Principle("p", "Why?", "Why?", "Which?")

    def ends(kind, **values):
        written = writer.write(kind, ASK, rule, 1, **values).ids
        tail = encoded(policy, NO_THOUGHTS)
        return written[-len(tail) :] == tail

    assert ends("critique", response="It is 4.") == text_ends
    assert ends("comparison", first="a", second="b", reasoning=True) == text_ends
    assert ends("comparison", first="a", second="b") == verdict_ends
