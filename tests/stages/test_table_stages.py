"""Stages on tables: the rows, split and prompts of JSON Lines, and results that survive a kill."""

from __future__ import annotations

import time

import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from tests import processes, table_files
from tests.feedback.fakes import WordTokenizer
from tests.folders import write_model

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


RUN = """
import sys
from jaxalign import pipeline
from jaxalign.config import from_config_dict
model, source, train, workdir, cache = sys.argv[1:]
pipeline.run(from_config_dict({
    "stages": ("sft",), "compile_cache": cache,
    "model": {"source": "huggingface", "path": model, "max_length": 64},
    "data": {"source": source, "train": train, "style": "hh", "held_out_share": 0.2},
    "sft": {"batch_rows": 2, "row_length": 64, "epochs": 12, "checkpoint_every": 8},
}), workdir)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_and_resumed_run_on_parquet_is_that_on_json_lines(tmp_path):
    model = str(write_model(tmp_path / "model"))
    lines, folder = (table_files.write_form(tmp_path, form, PAIRS, "rows") for form in ("jsonl", "folder"))

    def command(path, workdir):
        return ["-c", RUN, model, "preferences_jsonl", str(path), str(tmp_path / workdir), str(tmp_path / "cache")]

    processes.run_well(1, command(lines, "whole"))
    metrics = tmp_path / "cut" / "sft" / "metrics.jsonl"
    with processes.started(1, command(folder, "cut")) as running:
        end = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 9) and time.monotonic() < end:
            time.sleep(0.02)
        running[0].kill()
    assert not (tmp_path / "cut" / "sft" / "summary.json").exists()
    processes.run_well(1, command(folder, "cut"))
    cut, whole = ((tmp_path / workdir / "sft" / "metrics.jsonl").read_bytes() for workdir in ("cut", "whole"))
    assert cut == whole
