"""Stages on tables: the rows, split and prompts of JSON Lines, and results that survive a kill."""

from __future__ import annotations

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from tests import table_files
from tests.feedback.fakes import WordTokenizer
from tests.folders import write_model
from tests.self_killing import run_until_killed

pytest.importorskip("pyarrow")

PAIRS = [{"prompt": f"the cat {i % 23} sat", "chosen": f"yes {i} it did", "rejected": "no"} for i in range(40)]
ANSWERED = [{"prompt": f"the cat {i} sat", "response": f"yes {i}"} for i in range(24)]
FORMS = ("folder", "saved", "tfds")


def context(tmp_path, stage="sft", **data):
    model = {"source": "huggingface", "path": "none"}
    config = from_config_dict({"stages": (stage,), "model": model, "data": data | {"held_out_share": 0.2, "style": "hh"}})
    return StageContext(resolve_auto(config), tmp_path, tmp_path / stage, False)


@pytest.mark.parametrize("form", FORMS)
def test_stages_get_the_rows_of_json_lines(tmp_path, monkeypatch, form):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / form))
    for source, kind, rows in (("preferences_jsonl", "comparisons", PAIRS), ("messages_jsonl", "demonstrations", ANSWERED)):
        found = []
        for kept in ("jsonl", form):
            path = table_files.write_form(tmp_path / kept, kept, rows, f"rows_{kind}")
            train, held_out, _ = sources.source_rows(context(tmp_path, source=source, train=str(path)), WordTokenizer(), kind)
            found.append((list(train), list(held_out)))
        assert found[0] == found[1] and found[0][1]


def test_prompts_of_every_purpose_are_those_of_json_lines(tmp_path, monkeypatch):
    found = []
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    for form in ("jsonl", *FORMS):
        rows = {name: [{"ask": f"{name} {i}?"} for i in range(12)] for name in ("red", "good")}
        red, helpful = (table_files.write_form(tmp_path / form, form, part, name) for name, part in rows.items())
        data = {"source": "prompts_jsonl", "red_team": str(red), "helpful": str(helpful), "columns": ("prompt=ask",)}
        sets = sources.prompt_sets(context(tmp_path, "revise", **data), WordTokenizer())
        found.append([list(sets.of(purpose)) for purpose in ("red_team", "helpful", "rl", "compare", "evaluate")])
    assert all(part == found[0] for part in found[1:]) and found[0][0][0].messages[0].content.startswith("red ")


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_and_resumed_run_on_parquet_is_that_on_json_lines(tmp_path):
    model = str(write_model(tmp_path / "model"))
    lines, folder = (table_files.write_form(tmp_path, form, PAIRS, "rows") for form in ("jsonl", "folder"))

    def values(path):
        return {
            "stages": ("sft",), "compile_cache": str(tmp_path / "cache"),
            "model": {"source": "huggingface", "path": model, "max_length": 64},
            "data": {"source": "preferences_jsonl", "train": str(path), "style": "hh", "held_out_share": 0.2},
            "sft": {"batch_rows": 2, "row_length": 64, "epochs": 6, "checkpoint_every": 4},
        }

    pipeline.run(from_config_dict(values(lines)), tmp_path / "whole")
    run_until_killed(values(folder), tmp_path / "cut", "sft/metrics.jsonl", 9)  # After the second checkpoint.
    assert not (tmp_path / "cut" / "sft" / "summary.json").exists()
    pipeline.run(from_config_dict(values(folder)), tmp_path / "cut")
    cut, whole = ((tmp_path / workdir / "sft" / "metrics.jsonl").read_bytes() for workdir in ("cut", "whole"))
    assert cut == whole
