"""A chat model, files of prompts and a judge of the user's own, through all stages of Constitutional AI."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from tests.folders import write_model

pytestmark = pytest.mark.slow

JUDGE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py"
STAGES = ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
SIZES = {"batch": 16, "max_new_tokens": 48}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> pathlib.Path:
    """The work directory of a finished run. Tests read it and must not change it."""
    root = tmp_path_factory.mktemp("own")
    system = {"role": "system", "content": "Be kind."}
    asked = [[system, {"role": "user", "content": f"the cat sat {i} times, why?"}] for i in range(24)]
    (root / "red.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in asked))
    (root / "good.txt").write_text("".join(f"What is {i} + {i}?\n" for i in range(16)))
    config = from_config_dict({
        "stages": STAGES, "compile_cache": None,
        "model": {"source": "huggingface", "path": str(write_model(root / "model")), "max_length": 128},
        "data": {"source": "prompts_jsonl", "style": "chat", "red_team": str(root / "red.jsonl"),
                 "helpful": str(root / "good.txt"), "held_out_share": 0.2},
        "feedback": {"judge": f"{JUDGE}:Brevity"},
        "revise": SIZES | {"rounds": 2, "temperature": 3.0, "max_new_tokens": 64},  # Hot enough that some answers end.
        "sft": {"batch_rows": 2, "row_length": 128}, "compare": SIZES | {"prompts": 24},
        "preference": {"members": 1, "batch": 8, "max_length": 128},
        "ppo": {"iterations": 1, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8,
                "checks": {"step_zero": False}},
        "evaluate": SIZES | {"win_rate_prompts": 4, "max_new_tokens": 8},
    })
    pipeline.run(config, root / "run")
    return root / "run"


def read(path: pathlib.Path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows(workdir, stage):
    return [json.loads(line) for path in sorted((workdir / stage).glob("rows-*.jsonl")) for line in open(path)]


def test_revise_asks_the_judge_about_the_answers_of_the_model(workdir):
    found = rows(workdir, "revise")
    assert {(row["source"], row["round"]) for row in found} == {("red_team", 1), ("red_team", 2), ("helpful", 0)}
    assert all(row["messages"][0] == {"role": "system", "content": "Be kind."} for row in found if row["round"])
    assert all(row["revision"] == row["response"][: len(row["response"]) // 2] for row in found if row["round"])
    files = read(workdir / "revise" / "summary.json")["data"]["files"]
    assert [(file["rows"], file["prompts"]) for file in files] == [(24, 24), (16, 16)]


def test_sft_trains_on_the_complete_revisions(workdir):
    """All rounds and the helpful answers; data.min_held_out (8) of them, or a fifth, are held out."""
    complete = sum(row["complete"] for row in rows(workdir, "revise"))
    assert read(workdir / "sft" / "summary.json")["answers"] == complete - min(8, complete // 5)


def test_compare_labels_pairs_with_the_judge(workdir):
    found = rows(workdir, "compare")
    assert len(found) == 24 and {row["source"] for row in found} == {"red_team", "helpful"}
    for row in found:
        if len(row["response_a"]) != len(row["response_b"]):
            assert row["label"] == pytest.approx(0.9 if len(row["response_a"]) < len(row["response_b"]) else 0.1)


def test_no_prompt_of_training_is_evaluated(workdir):
    stages = ("revise", "compare", "evaluate")
    asked = {stage: {json.dumps(row["messages"]) for row in rows(workdir, stage)} for stage in stages}
    assert len(asked["evaluate"]) == 8 and len(asked["revise"]) == 32
    assert not asked["evaluate"] & (asked["revise"] | asked["compare"])


def test_evaluation_reports_win_rates_of_the_judge_and_no_gold_measures(workdir):
    summary = read(workdir / "summary.json")
    assert [(found["model"], found["against"], found["total"]) for found in summary["win_rates"]] == [
        ("sft", "base", 4), ("ppo", "base", 4), ("ppo", "sft", 4)]
    assert summary["rates"] == {} and set(summary["prompts"]) == {"red_team", "helpful"}
    assert (workdir / "report.html").exists()
