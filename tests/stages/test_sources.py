"""Prompts from a file with columns: split, left-out prompts and counts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.config import Config, DataConfig, ModelConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import StageContext
from tests import made_tokenizers
from tests.feedback.fakes import WordTokenizer


def context(tmp_path, rows, max_length=40, **data):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    config = from_config_dict({
        "stages": ("ppo",), "reward": {"source": "verifier"}, "ppo": {"max_new_tokens": 8},
        "model": {"source": "huggingface", "path": "x", "max_length": max_length},
        "data": {"source": "prompts_jsonl", "train": str(path), "prompt_field": "question", "style": "hh"} | data,
    })
    return StageContext(config, tmp_path, tmp_path / "ppo", False)


def test_a_file_of_prompts_is_split_and_keeps_its_columns(tmp_path, capsys):
    rows = [{"question": f"what is {i} and one", "answer": i + 1} for i in range(20)] + ["{"]
    made = context(tmp_path, rows, held_out_share=0.25, max_bad_share=0.1)
    train, held = (sources.prompts(made, WordTokenizer(), purpose, 100, 8) for purpose in ("rl", "evaluate"))
    assert len(train) == 15 and len(held) == 5
    assert sorted(prompt.columns["answer"] for prompt in train + held) == list(range(1, 21))
    assert len(sources.prompts(made, WordTokenizer(), "rl", 4, 8)) == 4
    shown = capsys.readouterr().out
    assert "sums.jsonl: 21 rows read, 20 prompts kept" in shown
    assert "1 broken or not a prompt; dropped (lines 21)" in shown
    assert reads.data_files(made.config) == {tmp_path / "sums.jsonl": "data.train"}


def test_prompts_that_are_too_long_are_left_out_with_a_warning(tmp_path, capsys):
    rows = [{"question": "word " * n, "answer": 0} for n in (3, 4, 60)]
    made = context(tmp_path, rows, held_out_share=0.0)
    assert len(sources.prompts(made, WordTokenizer(), "rl", 10, 8)) == 2
    shown = "0 of 3 rl prompts lost their oldest turns and 1 were left out, since they exceed 32 tokens"
    assert shown in capsys.readouterr().out
    assert made.left_out == {"the rl prompts": {"total": 3, "dropped": 1, "cut": 0}}
    with pytest.raises(UserError, match="no evaluate prompt"):
        sources.prompts(made, WordTokenizer(), "evaluate", 10, 8)


def test_a_changed_tokenizer_or_template_counts_as_a_changed_model(tmp_path):
    folder = made_tokenizers.qwen(tmp_path)
    (folder / "chat_template.jinja").write_text(made_tokenizers.CHATML)
    config = dataclasses.replace(Config(), model=ModelConfig(source="huggingface", path=str(folder)))
    assert {path.name for path in reads.base_files(config)} == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    }


def test_prompts_that_the_chat_template_rejects_are_left_out_and_named(tmp_path, capsys):
    made_tokenizers.unigram(tmp_path / "model")
    asked = {"role": "user", "content": "Why?"}
    rows = [[asked], [asked, asked], [asked | {"content": "What?"}]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    data = DataConfig(source="prompts_jsonl", train=str(tmp_path / "p.jsonl"), style="chat", held_out_share=0.0)
    config = dataclasses.replace(Config(), data=data, model=ModelConfig(source="huggingface", path=str(tmp_path / "model")))
    made = StageContext(config, tmp_path, tmp_path / "ppo", False)
    found = sources.prompts(made, run_models.load_tokenizer(made), "rl", 10, 8)
    assert [prompt.id for prompt in found] == ["p:1", "p:3"]
    shown = "1 of 3 rl prompts were left out, since the model's chat template rejects them (p:2)"
    assert shown in capsys.readouterr().out
