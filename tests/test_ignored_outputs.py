"""Stages whose output no later stage reads cause a warning at the start, and rows that a stage leaves out are recorded."""

from __future__ import annotations

import json

import pytest

from jaxalign import pipeline
from jaxalign.config import DEFAULT_STAGES, from_config_dict
from jaxalign.pipeline.graph import loader, unread
from jaxalign.stages.shared.base import Stage

PRETRAINED = {"model": {"source": "huggingface", "path": "x"}}


def warned(**values) -> list[str]:
    config = from_config_dict(values)
    sentences = unread(config, loader(config))
    assert all(sentence.startswith("config.stages has ") for sentence in sentences)
    return [sentence.split()[2].rstrip(",") for sentence in sentences]


@pytest.mark.parametrize(("values", "ignored"), [
    ({"stages": ("pretrain", "revise", "compare", "preference", "ppo")}, ["revise"]),
    ({"stages": ("pretrain", "compare", "ppo"), "reward": {"source": "callable", "callable": "m:f"}}, ["compare"]),
    ({"stages": ("pretrain", "compare", "preference", "reward_distill", "ppo")}, ["reward_distill"]),
    ({"stages": ("pretrain", "sft"), "data": {"source": "preferences_jsonl", "train": "a.jsonl"}, **PRETRAINED}, ["pretrain"]),
])
def test_an_output_that_no_later_stage_reads_is_named(values, ignored):
    assert warned(**values) == ignored


@pytest.mark.parametrize("stages", [
    DEFAULT_STAGES, ("pretrain",), ("pretrain", "revise"), ("pretrain", "revise", "sft", "evaluate"),
    ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report"), ("compare", "dpo"),
])
def test_usual_stages_cause_no_warning(stages):
    assert not warned(stages=stages)


@pytest.mark.parametrize(("stages", "more", "warns"), [
    (("pretrain", "ppo"), {"reward": {"source": "callable", "callable": "m:f"}}, True),
    (("pretrain", "ppo"), {"reward": {"source": "ai_feedback"}, "world": {"ratings": 0.2}}, False),
    (("pretrain", "revise"), {}, False), (("pretrain", "evaluate"), {}, False),
])
def test_a_constitution_that_no_judge_reads_is_named(stages, more, warns):
    config = from_config_dict({"stages": stages, "feedback": {"constitution": "mine.json"}} | more)
    sentences = unread(config, loader(config))
    assert [sentence[:65] for sentence in sentences] == warns * [
        "config.feedback.constitution is 'mine.json', which has no effect,"]


@pytest.mark.parametrize(("values", "ignored"), [
    ({}, ["red_team", "helpful"]),
    ({"data": {"eval": "e.jsonl"}, "stages": ("ppo", "evaluate")}, ["red_team", "helpful"]),
    ({"stages": ("ppo", "evaluate")}, []),  # Evaluation reads prompts that are held out of these files.
    ({"ppo": {"helpful_share": 0.5}}, ["red_team"]),
    ({"data": {"rl": ""}}, []),
])
def test_files_of_prompts_that_no_stage_reads_are_named(values, ignored):
    data = {"source": "prompts_jsonl", "rl": "rl.txt", "red_team": "r.txt", "helpful": "h.txt"} | values.get("data", {})
    reward = {"source": "callable", "callable": "m:f"}
    config = from_config_dict({"stages": ("ppo",), "reward": reward} | PRETRAINED | values | {"data": data})
    assert [sentence.split()[0] for sentence in unread(config, loader(config))] == [f"config.data.{name}" for name in ignored]


class Reader(Stage):
    """Leaves out some rows, and reads no stage."""

    config_fields = ()

    def __init__(self, name):
        self.name = name

    def run(self, context):
        if self.name == "sft":
            context.left_out["the pairs"] = {"total": 9, "dropped": 2, "cut": 1}
        (context.directory / "done").write_text("yes")


def test_the_start_of_a_run_warns_and_its_end_records_the_rows_left_out(tmp_path, capsys):
    config = from_config_dict({"stages": ("pretrain", "sft"), "compile_cache": None})
    pipeline.run(config, tmp_path, load=Reader)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == ("warning: config.stages has pretrain, but no stage of this run reads the output of stage pretrain (sft "
                     "will train without it): remove it, or change the stages or options that make the later stages read other "
                     "data")
    assert json.loads((tmp_path / "sft" / "left_out.json").read_text()) == {"the pairs": {"total": 9, "dropped": 2, "cut": 1}}
    assert "left_out.json" in json.loads((tmp_path / "sft" / "manifest.json").read_text())["outputs"]
    assert not (tmp_path / "pretrain" / "left_out.json").exists()
    pipeline.run(config, tmp_path, load=Reader)
    assert "warning" not in capsys.readouterr().out
