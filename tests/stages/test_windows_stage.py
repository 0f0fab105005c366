"""Stage sft in windows of rows: the same results from every format, exact resume, and reports on what was read."""

from __future__ import annotations

import json
import pathlib

import chex
import numpy as np
import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.sources.window_rows import is_held_out
from jaxalign.errors import UserError
from jaxalign.models.language_model import load_model
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.tracking.metrics import read_metrics
from tests import processes, table_files, tiny
from tests.folders import write_model
from tests.self_killing import run_until_killed

pytestmark = pytest.mark.slow

pytest.importorskip("pyarrow")

ROWS = [{"prompt": f"the cat {i % 23} sat", "chosen": f"yes {i} it did", "rejected": "no"} for i in range(90)]
SOURCE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "data_source.py"
ROWS[40] = {"prompt": "", "chosen": "yes", "rejected": "no"}


def config(tmp_path, train, stages=("sft",), **fields):
    data = {"source": "preferences_jsonl", "train": str(train), "style": "hh", "window": 32, "held_out_share": 0.2}
    return {
        "stages": stages, "compile_cache": str(tmp_path / "cache"),
        "model": {"source": "huggingface", "path": str(tmp_path / "model"), "max_length": 64},
        "data": data | fields.pop("data", {}),
        # With a constant learning rate the number of steps does not change the programs.
        "sft": {"batch_rows": 8, "row_length": 64, "epochs": 3, "checkpoint_every": 4,
                "optimizer": {"schedule": "constant"}} | fields,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same rows as JSON Lines and as a Parquet folder, each with its run."""
    folder = tmp_path_factory.mktemp("windows")
    write_model(folder / "model")
    data = {"lines": table_files.write_jsonl(folder / "rows.jsonl", ROWS),
            "tables": table_files.write_parquet_folder(folder / "rows", ROWS, 31)}
    for name, path in data.items():
        pipeline.run(from_config_dict(config(folder, path, ("sft", "report"))), folder / name)
    return folder


def test_the_results_do_not_depend_on_the_format(runs):
    metrics = [read_metrics(runs / name / "sft" / "metrics.jsonl") for name in ("lines", "tables")]
    assert metrics[0] == metrics[1] and len(metrics[0]) > 10
    summaries = [json.loads((runs / name / "sft" / "summary.json").read_text()) for name in ("lines", "tables")]
    assert all(summaries[0][name] == summaries[1][name] for name in ("held_out_loss", "loss_last", "answers", "tokens"))
    assert summaries[0]["held_out_loss"] > 0


def test_the_summary_counts_the_rows_of_the_windows_that_were_read(runs):
    data = json.loads((runs / "tables" / "sft" / "summary.json").read_text())["data"]
    windows = (runs / "tables" / "sft" / "windows.jsonl").read_text().splitlines()
    assert data["windows"] == 3 and data["rows"] == data["total_rows"] == 90
    # Later epochs are not counted again. The steps are an estimate: the run may begin one more epoch.
    assert len(windows) in (9, 10)
    assert data["counts"]["empty_prompts"] == 1 and data["pairs"] == 89 and 0 < data["held_out"] < 40
    assert data["unit"] == "row"
    page = (runs / "tables" / "report.html").read_text()
    assert "were kept; 1 (1.1%) with an empty question, dropped" in page


def test_no_dialogue_is_both_trained_on_and_held_out(runs):
    pairs = [Comparison(Prompt(str(i), (Message("user", row["prompt"]),), "human"), row["chosen"], "no", 1.0)
             for i, row in enumerate(ROWS)]
    held = {pair.prompt.messages[0].content for pair in pairs if is_held_out(pair, 0.2, 0)}
    trained = {pair.prompt.messages[0].content for pair in pairs if not is_held_out(pair, 0.2, 0)}
    assert held and held.isdisjoint(trained)


def test_too_many_broken_rows_stop_the_stage(runs, tmp_path):
    broken = table_files.write_jsonl(tmp_path / "rows.jsonl", [{"chosen": 1} for _ in range(9)] + ROWS[:30])
    with pytest.raises(UserError, match=r"9 of 39 lines of .* are broken, more than the accepted share 0.01"):
        pipeline.run(from_config_dict(config(runs, broken, data={"window": 64})), tmp_path / "run")


@pytest.mark.parametrize(("fields", "message"), [
    ({"stages": ("preference", "reward_distill")}, "stage reward_distill reads all rows before it begins; leave it out"),
    ({"data": {"limit": 5}}, "config.data.limit is 5; set one of them to 0"),
    ({"data": {"extra_train": ("more.jsonl",)}}, "extra_train is set; put all files into one folder"),
    ({"stages": ("evaluate",), "data": {"source": f"{SOURCE}:SUMS", "train": ""}},
     "does not read rows in windows; set window to 0"),
])
def test_what_cannot_be_read_in_windows_is_refused(tmp_path, fields, message):
    values = config(tmp_path, "rows.jsonl")
    values |= {name: value for name, value in fields.items() if name != "data"}
    values["data"] |= fields.get("data", {})
    with pytest.raises(UserError, match=message):
        from_config_dict(values)


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(runs):
    values = config(runs, runs / "rows", ("sft", "report"))
    run_until_killed(values, runs / "cut", "sft/metrics.jsonl", 9)  # After the second checkpoint.
    assert not (runs / "cut" / "sft" / "summary.json").exists()
    pipeline.run(from_config_dict(values), runs / "cut")
    for name in ("metrics.jsonl", "summary.json", "windows.jsonl"):
        assert (runs / "cut" / "sft" / name).read_bytes() == (runs / "tables" / "sft" / name).read_bytes()


CONFIG = """
from jaxalign.config import default_config
def get_config():
    config = default_config()
    config.update({values!r})
    return config
"""


@pytest.mark.process
def test_two_processes_train_the_parameters_of_one(runs, tmp_path):
    """Both prepare the same windows, and each computes on its rows of a batch. Sums over devices round differently."""
    values = config(runs, runs / "rows", steps=6, epochs=1)
    pipeline.run(from_config_dict(values), tmp_path / "1")
    values |= {"mesh": {"data": 2, "fsdp": 4}, "compile_cache": None}
    file = tmp_path / "small.py"
    file.write_text(CONFIG.format(values=values))
    processes.run_well(2, ["-m", "jaxalign.train", f"--config={file}", f"--workdir={tmp_path / '2'}"])
    one, two = (tmp_path / name / "sft" for name in "12")
    assert (two / "windows.jsonl").read_text() == (one / "windows.jsonl").read_text()
    expected, found = (read_metrics(folder / "metrics.jsonl") for folder in (one, two))
    assert len(found) == 6 and [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    np.testing.assert_allclose([row["loss"] for row in found], [row["loss"] for row in expected], rtol=1e-5)
    first, second = (tiny.to_host(load_model(folder).params) for folder in (one, two))
    chex.assert_trees_all_close(second, first, rtol=1e-4, atol=1e-6)
