"""A user's tracker in `config.tracking.trackers` receives every step once, even after an interruption and a resume."""

from __future__ import annotations

import pathlib
import re

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.progress import Progress

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "tracker.py"
CONFIG = {
    "seed": 3,
    "stages": ("pretrain",),
    "data": {"source": "arithmetic"},
    "arithmetic": {"examples": 200},
    "model": {"layers": 1, "embed": 16, "mlp": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_length": 32},
    "pretrain": {"steps": 10, "batch_rows": 2, "row_length": 32, "checkpoint_every": 4},
    "tracking": {"trackers": (f"{PLUGIN}:Lines",)},
}


@pytest.mark.slow
def test_it_receives_every_step_once_despite_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKED", str(tmp_path / "tracked.txt"))
    config, calls = from_config_dict(CONFIG), []

    def interrupted(self, *_, **__):
        calls.append(self)
        if len(calls) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "update", interrupted)
        pipeline.run(config, tmp_path / "run")
    pipeline.run(config, tmp_path / "run")
    lines = (tmp_path / "tracked.txt").read_text().splitlines()
    assert [line for line in lines if "loss" not in line] == [
        "pretrain starts at 0, seed 3", "pretrain interrupted", "pretrain starts at 4, seed 3", "pretrain done",
    ]
    logged = [re.fullmatch(r"pretrain (\d+) loss (.+)", line).groups() for line in lines if "loss" in line]
    rows = read_metrics(tmp_path / "run" / "pretrain" / "metrics.jsonl")
    assert [(int(step), float(loss)) for step, loss in logged] == [(row["step"], row["loss"]) for row in rows]
    assert [row["step"] for row in rows] == list(range(10))


@pytest.mark.parametrize(("trackers", "message"), [
    (("wandbb",), "config.tracking.trackers is 'wandbb'; one of .*did you mean wandb"),
    ((f"{PLUGIN}:Missing",), "has no Missing"),
    ((f"{PLUGIN}:os",), "a class with the methods start"),
    ((f"{PLUGIN}:Lines",) * 2, "names .* twice"),
])
def test_an_invalid_name_is_refused_before_the_run(trackers, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(CONFIG | {"tracking": {"trackers": trackers}})
