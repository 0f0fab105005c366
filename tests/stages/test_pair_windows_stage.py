"""Stages preference and dpo in windows of rows: the same parameters from every format, exact resume, and their summaries."""

from __future__ import annotations

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.progress import Progress
from tests import table_files
from tests.folders import write_model
from tests.self_killing import run_until_killed

pytestmark = pytest.mark.slow

pytest.importorskip("pyarrow")

STAGES = ("preference", "dpo")
ROWS = [{"prompt": f"the cat {i % 23} sat", "chosen": f"yes {i} it did", "rejected": "no"} for i in range(60)]
ROWS[40] = {"prompt": "", "chosen": "yes", "rejected": "no"}
BATCHES = {"batch": 8, "max_length": 64, "checkpoint_every": 4, "epochs": 2}


def config(tmp_path, train, stages=STAGES, data=()):
    fields = {"source": "preferences_jsonl", "train": str(train), "style": "hh", "window": 32, "held_out_share": 0.2}
    return {
        "stages": stages, "compile_cache": str(tmp_path / "cache"),
        "model": {"source": "huggingface", "path": str(tmp_path / "model"), "max_length": 64},
        "data": fields | dict(data),
        "preference": BATCHES | {"members": 2, "early_stopping": True},
        "dpo": dict(BATCHES),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same rows in three formats, each with its run."""
    folder = tmp_path_factory.mktemp("pair_windows")
    write_model(folder / "model")
    data = {"lines": table_files.write_jsonl(folder / "rows.jsonl", ROWS),
            "tables": table_files.write_parquet_folder(folder / "rows", ROWS, 31)}
    try:
        data["saved"] = table_files.save_dataset(folder / "saved_rows", ROWS)
    except ImportError:
        pass
    for name, path in data.items():
        pipeline.run(from_config_dict(config(folder, path, (*STAGES, "report"))), folder / name)
    return folder, tuple(data)


def read(path):
    return json.loads(path.read_text())


def params_of(folder):
    """The checksums of the parameters of a stage or a member."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata((folder / "params").absolute()).custom_metadata["checksums"]


@pytest.mark.parametrize("stage", ["preference", "preference/member-1", "dpo"])
def test_the_parameters_do_not_depend_on_the_format(runs, stage):
    folder, names = runs
    first, *others = (params_of(folder / name / stage) for name in names)
    assert first and others and all(other == first for other in others)
    files = [(folder / name / stage / "metrics.jsonl").read_text() for name in names]
    assert len(set(files)) == 1 and files[0].count("\n") > 4


def test_the_summaries_count_the_rows_that_were_read(runs):
    folder, _ = runs
    for stage in STAGES:
        summary = read(folder / "tables" / stage / "summary.json")
        data, windows = summary["data"], (folder / "tables" / stage / "windows.jsonl").read_text().splitlines()
        assert data["total_rows"] == 60 and data["counts"]["empty_prompts"] == 1 and data["unit"] == "row"
        assert data["windows"] <= 2 and len(windows) in (4, 5) and 0 < data["held_out"] < 30
        assert summary["held_out"]["pairs"] > 0 and summary["steps"] > 4
    summary = read(folder / "tables" / "preference" / "summary.json")
    assert summary["train_pairs"] + data["held_out"] == 59 and summary["baselines"]["length"]["rule"] == "longer"
    assert summary["early_stopping"]["choosing_pairs"] > 0 and len(summary["members"]) == 2
    assert (folder / "tables" / "preference" / "member-1" / "windows.jsonl").exists()
    page = (folder / "tables" / "report.html").read_text()
    assert "59 pairs kept." in page and "were kept; 1 (1.7%) with an empty question, dropped" in page


def test_margins_that_the_first_window_lacks_are_refused(runs, tmp_path):
    values = config(runs[0], runs[0] / "rows", ("preference",))
    values["preference"]["margin_weight"] = 1.0
    with pytest.raises(UserError, match='no pair of the first window has a "margin" above 0'):
        pipeline.run(from_config_dict(values), tmp_path / "run")


def test_kto_trains_on_judged_answers_in_windows(runs, tmp_path):
    judged = [{"prompt": row["prompt"] or "?", "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(ROWS)]
    path = table_files.write_jsonl(tmp_path / "judged.jsonl", judged)
    values = config(runs[0], path, ("dpo",), {"source": "judgements_jsonl"})
    values["dpo"] |= {"objective": "kto"}
    pipeline.run(from_config_dict(values), tmp_path / "run")
    summary = read(tmp_path / "run" / "dpo" / "summary.json")
    assert summary["data"]["answers"] == 60 and summary["balance"]["desirable"] > 0 and np.isfinite(summary["loss_last"])


@pytest.mark.process
@pytest.mark.slow
def test_a_run_that_is_killed_and_then_interrupted_equals_an_uninterrupted_one(runs, monkeypatch):
    folder, _ = runs
    values, whole = config(folder, folder / "rows", (*STAGES, "report")), folder / "tables"
    run_until_killed(values, folder / "cut", "preference/member-1/metrics.jsonl", 9)  # After the second checkpoint.
    assert not (folder / "cut" / "preference" / "member-1" / "params").exists()
    metrics, update = folder / "cut" / "dpo" / "metrics.jsonl", Progress.update

    def interrupted(self, *given, **named):
        update(self, *given, **named)
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "update", interrupted)
        pipeline.run(from_config_dict(values), folder / "cut")
    assert not (folder / "cut" / "dpo" / "params").exists()
    pipeline.run(from_config_dict(values), folder / "cut")
    for place in ("preference", "preference/member-1", "dpo"):
        assert params_of(folder / "cut" / place) == params_of(whole / place)
        for name in ("metrics.jsonl", "windows.jsonl"):
            assert (folder / "cut" / place / name).read_bytes() == (whole / place / name).read_bytes()
