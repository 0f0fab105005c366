"""The preference stage beyond the one plain model: ensembles on a tiny run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from tests.stages.test_end_to_end import CONFIG, done, fingerprints, read, run  # noqa: F401

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "ppo")
CHANGES = {
    "stages": STAGES,
    "preference": CONFIG["preference"] | {"members": 2, "combine": "mean_minus_std", "std_weight": 0.5, "epochs": 4,
                                          "checkpoint_every": 4},
    "ppo": CONFIG["ppo"] | {"iterations": 1},
}  # fmt: skip


@pytest.fixture(scope="session")
def ensemble(done, tmp_path_factory):  # noqa: F811
    workdir = tmp_path_factory.mktemp("ensemble")
    for stage in STAGES[:4]:
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, **CHANGES)
    return workdir


def test_members_are_trained_apart(ensemble):
    folder = ensemble / "preference"
    summary = read(folder / "summary.json")
    first, second = (read_metrics(place / "metrics.jsonl") for place in (folder, folder / "member-1"))
    assert len(first) == len(second) == summary["steps"] and first[0]["loss"] != second[0]["loss"]
    assert len(summary["members"]) == 2 and summary["combine"] == "mean_minus_std" and summary["std_weight"] == 0.5
    assert summary["disagreement"] > 0
    assert np.mean([member["scale"] for member in summary["members"]]) == pytest.approx(1)
    rows = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert sum(row["phase"] == "start" for row in rows) == 2 and not (folder / "member-1" / "timing.jsonl").exists()


def test_rl_is_rewarded_by_all_of_them(ensemble):
    """The scores of a response are on the scale that the summary says: of order 1, and of no member alone."""
    row = read_metrics(ensemble / "ppo" / "metrics.jsonl")[0]
    assert np.isfinite(row["score"]) and abs(row["score"]) < 5 and np.isfinite(row["value_loss"])


def test_the_first_member_is_the_one_model_there_would_be_without_the_others(ensemble, done):  # noqa: F811
    """Its first 5 steps are those of the run without an ensemble, but for the learning rate's decay, which is longer."""
    found, alone = (read_metrics(run / "preference" / "metrics.jsonl") for run in (ensemble, done))
    assert found[0]["loss"] == alone[0]["loss"] and found[0]["tokens"] == alone[0]["tokens"]
    assert not (done / "preference" / "member-1").exists()
    assert "members" not in read(done / "preference" / "summary.json")


def test_an_interruption_between_members_changes_nothing(ensemble, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(ensemble, again)
    folder = again / "preference"
    last = max(int(path.name) for path in (folder / "member-1" / "checkpoints").iterdir())
    shutil.rmtree(folder / "member-1" / "checkpoints" / str(last))
    shutil.rmtree(folder / "member-1" / "params")
    (folder / "summary.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(again, **CHANGES)
    for name in ("metrics.jsonl", "summary.json", "member-1/metrics.jsonl"):
        assert (folder / name).read_bytes() == (ensemble / "preference" / name).read_bytes()


def test_one_model_has_nothing_to_combine():
    with pytest.raises(UserError, match="config.preference.combine is 'min' but config.preference.members is 1"):
        from_config_dict({"preference": {"combine": "min"}})
