"""The stages that offload leave what they leave without: from the start, and gone on with from a checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign.config import DEFAULT_STAGES
from tests.stages.test_end_to_end import done, read, run  # noqa: F401

OFFLOAD = {"mesh": {"offload": ("optimizer", "frozen")}}
SETTINGS = {
    "ppo": {"stages": DEFAULT_STAGES[:6]},
    "online_dpo": {"stages": (*DEFAULT_STAGES[:4], "online_dpo"), "online_dpo": {
        "iterations": 3, "batch": 8, "prompts": 16, "max_new_tokens": 24, "checkpoint_every": 2}},
}  # fmt: skip


@pytest.mark.parametrize("stage", SETTINGS)
def test_metrics_are_equal_to_the_last_digit(done, tmp_path, stage):  # noqa: F811
    plain, folder = tmp_path / "plain", tmp_path / "offloaded" / stage
    for workdir in (plain, folder.parent):
        shutil.copytree(done, workdir, ignore=shutil.ignore_patterns(*DEFAULT_STAGES[5:]))
    run(plain, **SETTINGS[stage])
    run(folder.parent, **SETTINGS[stage] | OFFLOAD)
    expected = (plain / stage / "metrics.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == expected
    assert read(folder / "summary.json") == read(plain / stage / "summary.json")
    # The last iteration again, from the checkpoint before it, whose optimizer state is read into host memory.
    shutil.rmtree(folder / "checkpoints" / "3")
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(folder.parent, **SETTINGS[stage] | OFFLOAD)
    assert (folder / "metrics.jsonl").read_bytes() == expected
