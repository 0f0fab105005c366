"""Offloading does not change the results of a stage, even after a resume. test_ppo.py compares PPO's iterations."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign.config import DEFAULT_STAGES
from tests.small_run import read, run

OFFLOAD = {"mesh": {"offload": ("optimizer", "frozen")}}
STAGE = "online_dpo"
SETTINGS = {"stages": (*DEFAULT_STAGES[:4], STAGE), STAGE: {
    "iterations": 3, "batch": 8, "prompts": 16, "max_new_tokens": 24, "checkpoint_every": 2}}


@pytest.mark.slow
def test_metrics_are_equal_to_the_last_digit(done, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "offloaded" / STAGE
    for workdir in (plain, folder.parent):
        shutil.copytree(done, workdir, ignore=shutil.ignore_patterns(*DEFAULT_STAGES[5:]))
    run(plain, **SETTINGS)
    run(folder.parent, **SETTINGS | OFFLOAD)
    expected = (plain / STAGE / "metrics.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == expected
    assert read(folder / "summary.json") == read(plain / STAGE / "summary.json")
    # Repeat the last iteration from the checkpoint before it; its optimizer state is read into host memory.
    shutil.rmtree(folder / "checkpoints" / "3")
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(folder.parent, **SETTINGS | OFFLOAD)
    assert (folder / "metrics.jsonl").read_bytes() == expected
