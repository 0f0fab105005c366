"""Prompts from a file with columns: split, left-out prompts and counts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.config import Config, DataConfig, ModelConfig, from_config_dict
from jaxalign.data.sources.base import PromptSets, Split
from jaxalign.errors import UserError
from jaxalign.records import Demonstration, Message, Prompt
from jaxalign.registry.data_sources import DataSourceRecord
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.breakdown import prompt_shares
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
    assert "1 broken; dropped (lines 21); line 21: not JSON: " in shown
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


def test_lines_about_the_prompts_of_a_later_round_name_it(tmp_path, capsys):
    rows = [{"question": "word " * n, "answer": 0} for n in (3, 4, 60)]
    made = dataclasses.replace(context(tmp_path, rows, held_out_share=0.0), round=2)
    sources.prompts(made, WordTokenizer(), "rl", 10, 8)
    prompt_shares(made, ["helpful", "red_team"])
    prompt_shares(made, ["red_team"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(line.startswith("[ppo, round 2] ") for line in lines)


def long_rows(lengths, name):
    return [Demonstration(Prompt(f"{name}{i}", (Message("user", f"{name} {i}"),), name), "word " * length)
            for i, length in enumerate(lengths)]


def long_split(inputs):
    """Three of six training rows and one of two held-out rows do not fit into 40 tokens. One must lose turns."""
    turns = Message("user", "word " * 100), Message("assistant", "yes"), Message("user", "and now")
    cut = Demonstration(Prompt("cut", turns, "train"), "word")
    return Split([*long_rows((3, 100, 4, 100, 100), "train"), cut], long_rows((100, 3), "held"))


LONG = DataSourceRecord("long", demonstrations=long_split)


def test_left_out_rows_of_both_parts_are_counted(tmp_path, capsys):
    config = from_config_dict({
        "stages": ("sft",), "model": {"source": "huggingface", "path": "x", "max_length": 40},
        "data": {"source": f"{__file__}:LONG", "style": "hh"},
    })
    made = StageContext(config, tmp_path, tmp_path / "sft", False)
    train, held_out, _ = sources.source_rows(made, WordTokenizer(), "demonstrations")
    assert [row.prompt.id for row in (*train, *held_out)] == ["train0", "train2", "cut", "held1"]
    assert list(made.left_out.values()) == [{"total": 8, "dropped": 4, "cut": 1}]
    cut, dropped = capsys.readouterr().out.splitlines()
    assert cut.startswith("[sft] 1 of 8 rows of config.data.source") and cut.endswith("since they exceed 40 tokens")
    assert dropped.startswith("[sft] 4 of 8 rows of config.data.source")


def asked(numbers, name="p"):
    return [Prompt(f"{name}{i}", (Message("user", f"why {i}"),), name) for i in numbers]


def answered_split(inputs):
    """The dialogues 3 and 4 are on both sides, 3 twice."""
    train, held_out = ([Demonstration(prompt, "because") for prompt in asked(numbers)]
                       for numbers in ((0, 1, 2, 3, 4, 3), (3, 4, 5, 6, 3)))
    return Split(train, held_out)


SHARED = DataSourceRecord("shared", demonstrations=answered_split)
SHARED_PROMPTS = DataSourceRecord("shared_prompts", prompts=lambda inputs: Split(asked(range(5)), asked((4, 5, 6))))
SHARED_SETS = DataSourceRecord("shared_sets", prompts=lambda inputs: PromptSets(
    asked(range(5)), asked(range(4, 9), "eval"), helpful=asked((7, 8, 9), "helpful")))
APART = DataSourceRecord("apart", prompts=lambda inputs: Split(asked(range(5)), asked((5, 6))))
UNSPLIT = DataSourceRecord("unsplit", prompts=lambda inputs: [*asked(range(9)), *asked(range(9), "again")])


def custom(tmp_path, name, stage="ppo"):
    config = from_config_dict({
        "stages": (stage,), "model": {"source": "huggingface", "path": "x", "max_length": 40}, "ppo": {"max_new_tokens": 8},
        "data": {"source": f"{__file__}:{name}", "style": "hh", "min_held_out": 0},
        "reward": {"source": "callable", "callable": "mine.py:score"},
    })
    return StageContext(config, tmp_path, tmp_path / stage, False)


@pytest.mark.parametrize(("name", "shared"), [
    ("SHARED", "2 of 4"), ("SHARED_PROMPTS", "1 of 3"), ("SHARED_SETS", "3 of 5"), ("APART", None), ("UNSPLIT", None)])
def test_held_out_dialogues_of_custom_sources_that_are_trained_on_are_warned_about(tmp_path, capsys, name, shared):
    sources.prompt_sets(custom(tmp_path, name), WordTokenizer())
    assert capsys.readouterr().out == (
        f"[ppo] warning: {shared} held-out dialogues are also trained on, so held-out measures are too good; remove them from "
        "one side\n" if shared else ""
    )


def test_a_stage_that_trains_on_the_rows_also_warns_about_shared_dialogues(tmp_path, capsys):
    train, held_out, _ = sources.source_rows(custom(tmp_path, "SHARED", "sft"), WordTokenizer(), "demonstrations")
    assert (len(train), len(held_out)) == (6, 5)
    assert capsys.readouterr().out.startswith("[sft] warning: 2 of 4 held-out dialogues are also trained on")


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
