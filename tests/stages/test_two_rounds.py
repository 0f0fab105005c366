"""A second round of labels, preference model and RL, with a tiny model and a judge of the user's own."""

from __future__ import annotations

import json
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest

import jaxalign as ja
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.config.finished import finished_stage
from jaxalign.rl.iteration import PromptStream
from jaxalign.stages.shared import run_models
from jaxalign.tracking.metrics import read_metrics
from tests.folders import write_model
from tests.tracking.pages import check_links

pytestmark = pytest.mark.slow

JUDGE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py"
STAGES = ("compare", "preference", "ppo", "evaluate", "report")


@pytest.fixture(scope="module")
def root(tmp_path_factory, few_sampling_programs) -> pathlib.Path:
    root = tmp_path_factory.mktemp("rounds")
    (root / "prompts.txt").write_text("".join(f"the cat sat {i} times, why?\n" for i in range(45)))
    write_model(root / "model")
    return root


def run(root, workdir, rounds):
    return pipeline.run(from_config_dict({
        "rounds": rounds, "stages": STAGES, "compile_cache": None,
        "tracking": {"system_seconds": 0},  # The file system.jsonl appears only in a run of more than 10 s.
        "model": {"source": "huggingface", "path": str(root / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "style": "chat", "rl": str(root / "prompts.txt"), "held_out_share": 0.2},
        "feedback": {"judge": f"{JUDGE}:Brevity"},
        "compare": {"prompts": 16, "batch": 16, "max_new_tokens": 12},
        "preference": {"members": 1, "batch": 8, "max_length": 128, "epochs": 1},
        "ppo": {"iterations": 3, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8, "checkpoint_every": 1,
                "checks": {"step_zero": False}, "optimizer": {"learning_rate": 1e-3}},
        "evaluate": {"batch": 8, "win_rate_prompts": 4, "max_new_tokens": 8},
    }), workdir)


@pytest.fixture(scope="module")
def once(root):
    """A finished run of one round. Tests must not change it."""
    run(root, root / "once", 1)
    return root / "once"


@pytest.fixture(scope="module")
def twice(root, once):
    """The same work directory with a second round, and the folders of the policies that the new round loaded."""
    workdir, loaded, load = root / "twice", [], run_models.load_params
    shutil.copytree(once, workdir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_models, "load_params", lambda path, model: (loaded.append(path), load(path, model))[1])
        run(root, workdir, 2)
    return workdir, [str(path.relative_to(workdir)) for path in loaded]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(folder):
    return [json.loads(line) for path in sorted(folder.glob("rows-*.jsonl")) for line in open(path)]


def params(folder):
    return jax.tree.map(np.asarray, ja.load_model(folder).params)


def test_one_round_has_no_folder_of_rounds(once):
    files = {"config.json", "summary.json", "report.html", ".lock"}
    assert {path.name for path in once.iterdir()} == {*STAGES, *files}


def test_a_new_round_keeps_the_first_one(once, twice):
    workdir, _ = twice
    for stage in ("compare", "preference", "ppo"):
        assert contents(workdir / stage) == contents(once / stage)
        assert read(workdir / "round-2" / stage / "manifest.json")["status"] == "done"
    assert (workdir / "evaluate.old-1").is_dir() and (workdir / "report.old-1").is_dir()


def test_the_second_round_starts_from_the_policy_of_the_first(twice):
    workdir, loaded = twice
    assert loaded[:3] == ["ppo/params"] * 3  # compare, preference and ppo.
    first = read(workdir / "ppo" / "manifest.json")["output_hash"]
    for stage in ("compare", "preference", "ppo"):
        assert read(workdir / "round-2" / stage / "manifest.json")["inputs"]["ppo"] == first
    assert set(read(workdir / "round-2/ppo/manifest.json")["inputs"]) == {"ppo", "round-2/preference"}


def test_the_reference_of_the_second_round_is_the_policy_at_its_start(twice):
    """At step 0 the policy equals its reference, and the policies of the rounds differ."""
    workdir, _ = twice
    assert abs(read_metrics(workdir / "round-2/ppo/metrics.jsonl")[0]["kl_k3"]) < 1e-9
    assert abs(read_metrics(workdir / "ppo/metrics.jsonl")[2]["kl_k3"]) > 1e-7
    first, second = (params(workdir / folder) for folder in ("ppo", "round-2/ppo"))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_the_second_round_has_new_prompts(twice):
    """45 prompts without the held-out fifth contain two blocks of 16."""
    workdir, _ = twice
    first, second = ({row["prompt_id"] for row in rows(workdir / folder)} for folder in ("compare", "round-2/compare"))
    assert len(first) == len(second) == 16 and not first & second


def test_the_evaluation_and_the_report_compare_the_rounds(once, twice):
    workdir, _ = twice
    summary, before = read(workdir / "summary.json"), read(once / "summary.json")
    assert summary["models"] == ["base", "ppo", "round-2/ppo"]
    assert set(summary["kl"]) == set(summary["models"])
    assert {name: summary["length"][name] for name in ("base", "ppo")} == before["length"]  # They answer as before.
    assert ("round-2/ppo", "ppo") in {(row["model"], row["against"]) for row in summary["win_rates"]}
    page = (workdir / "report.html").read_text(encoding="utf-8")
    assert {"rounds", "changes", "rl"} <= set(check_links(workdir / "report.html"))
    assert "RL in round 2 (stage ppo, round 2)" in page
    for text in ("The rounds", "Round 2", "Decided pairs", "after RL, round 2 (round-2/ppo)", "compare, round 2"):
        assert text in page
    assert "The rounds" not in (once / "report.html").read_text(encoding="utf-8")


def test_an_interrupted_second_round_ends_like_an_uninterrupted_one(root, twice, tmp_path, monkeypatch):
    workdir, at = tmp_path / "run", PromptStream.at
    shutil.copytree(twice[0], workdir)
    for name in ("round-2/ppo", "evaluate", "report"):
        shutil.rmtree(workdir / name)

    def interrupted(stream, step):
        if step == 2:
            raise KeyboardInterrupt
        return at(stream, step)

    with monkeypatch.context() as patch:
        patch.setattr(PromptStream, "at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(root, workdir, 2)
    assert read(workdir / "round-2/ppo/manifest.json")["status"] == "running"
    run(root, workdir, 2)
    for name in ("manifest.json", "metrics.jsonl", "summary.json"):
        assert (workdir / "round-2/ppo" / name).read_bytes() == (twice[0] / "round-2/ppo" / name).read_bytes()
    chex.assert_trees_all_equal(params(workdir / "round-2/ppo"), params(twice[0] / "round-2/ppo"))


def test_a_stage_of_a_later_round_is_a_finished_stage(twice):
    stage = finished_stage(twice[0] / "round-2" / "ppo")
    assert (stage.name, stage.workdir) == ("ppo", twice[0])
    assert ja.load_model(twice[0] / "round-2" / "ppo").style == "chat"
