"""Rewards of RL on tiny runs: a callable and its failures, a verifier, ratings and sums."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.report.page import render_report
from tests.small_run import CONFIG, read, rows, run
from tests.tracking.pages import check_links

STAGES = ("pretrain", "revise", "sft", "ppo", "evaluate")
GOOD = """
import json, pathlib
def score(prompts, responses, **columns):
    log = pathlib.Path(__file__).with_suffix(".jsonl")
    with open(log, "a") as file:
        for row in zip(prompts, responses, columns["prompt_id"], columns["source"]):
            file.write(json.dumps(row) + "\\n")
    return [0.73 if i else float("nan") for i in range(len(responses))]
"""


def changes(path, **reward):
    reward = {"source": "callable", "callable": f"{path}:score", "backoff_s": 0.0} | reward
    return {"stages": STAGES, "reward": reward, "ppo": CONFIG["ppo"] | {"advantages": "rloo", "group_size": 2}}


def started(done, workdir):
    for stage in STAGES[:3]:
        shutil.copytree(done / stage, workdir / stage)
    return workdir


@pytest.mark.slow
def test_pitfall_20_a_reward_can_be_a_callable(done, tmp_path, caplog):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    workdir = started(done, tmp_path / "run")
    run(workdir, **changes(path))
    metrics = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert [row["kept"] for row in metrics] == [7.0] * 3  # the NaN of each batch is dropped
    assert [row["score"] for row in metrics] == pytest.approx([0.73] * 3)  # scores are not rounded
    assert np.isfinite([row["policy_loss"] for row in metrics]).all()
    seen = [eval(line, {"null": None}) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    asked, seen = [row for row in seen if row[3] != "rl"], [row for row in seen if row[3] == "rl"]
    assert len(seen) == 24 and len(asked) > 0
    assert read(workdir / "summary.json")["reward"] == pytest.approx(dict.fromkeys(("base", "sft", "ppo"), 0.73))
    prompt, response, name, source = seen[0]
    assert prompt[-1]["role"] == "user" and isinstance(response, str) and source == "rl" and name.startswith("rl-")
    assert [row[2] for row in seen[0::2]] == [row[2] for row in seen[1::2]]  # groups of two are contiguous
    assert "gave no score for 1 of 8 responses" in caplog.text
    assert read(workdir / "summary.json")["models"] == ["base", "sft", "ppo"]
    assert {"changes", "rl"} <= set(check_links(render_report(workdir)))
    path.write_text(GOOD + "\n# changed\n")
    with pytest.raises(UserError, match=r"mine\.py"):
        run(workdir, **changes(path))


@pytest.mark.slow
def test_a_callable_reward_works_with_a_critic(done, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    return [len(r) / 100 for r in responses]\n")
    workdir = started(done, tmp_path / "run")
    run(workdir, **changes(path) | {"ppo": CONFIG["ppo"]})
    metrics = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert all(np.isfinite(row["value_loss"]) for row in metrics)


@pytest.mark.slow
def test_a_callable_that_fails_stops_the_run_with_a_sentence(done, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    raise RuntimeError('no such model')\n")
    workdir = started(done, tmp_path / "run")
    with pytest.raises(UserError, match=r"gave no score for 8 of 8 responses .*no such model.* more than"):
        run(workdir, **changes(path))


@pytest.mark.parametrize(
    ("reward", "ppo", "message"),
    [
        ({"source": "callable"}, {}, "config.reward.callable is ''"),
        ({"source": "callable", "callable": "length.py"}, {}, "FILE.py:function"),
        ({"callable": "length.py:brief"}, {}, "set config.reward.source to callable"),
        ({"source": "callable", "callable": "length.py:brief"}, {"score_clip": 1.0}, "score_clip is 1.0"),
        ({"while_sampling": True}, {}, "while_sampling is True.*source is 'preference'"),
    ],
)
def test_a_callable_must_be_configured_exactly_where_it_is_used(reward, ppo, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"reward": reward, "ppo": ppo})


BY_ITSELF = """
import json, pathlib
def score(prompts, responses, **columns):
    with open(pathlib.Path(__file__).with_suffix(".jsonl"), "a") as file:
        file.write(json.dumps(list(zip(columns["prompt_id"], responses))) + "\\n")
    return [len(r) / 100 if len(r) % 5 else None for r in responses]
"""


@pytest.mark.slow
def test_a_callable_can_run_while_other_responses_are_sampled(done, tmp_path):
    """It gets more calls of fewer rows: each row once, and every score reaches its row."""
    logged, calls = [], []
    for early in (False, True):
        path = tmp_path / f"mine{early}.py"
        path.write_text(BY_ITSELF)
        workdir = started(done, tmp_path / str(early))
        run(workdir, **changes(path, while_sampling=early, max_dropped_share=1.0) | {"ppo": changes(path)["ppo"] | {
            "temperature": 1.3, "max_new_tokens": 72}, "stages": ("pretrain", "revise", "sft", "ppo")})
        logged.append(read_metrics(workdir / "ppo" / "metrics.jsonl"))
        calls.append([json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()])
    assert logged[1] == logged[0]
    assert len(calls[0]) == 3 < len(calls[1])
    asked = [sorted(row for call in each for row in call) for each in calls]
    assert asked[1] == asked[0] and len(asked[0]) == 24


@pytest.mark.slow
def test_a_sum_has_weights_and_a_length_penalty_and_reports_its_parts(done, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    return [2.0] * len(responses)\n")
    workdir = started(done, tmp_path / "run")
    for stage in ("compare", "preference"):
        shutil.copytree(done / stage, workdir / stage)
    reward = {"source": "preference+callable", "callable": f"{path}:score", "weights": (0.5, 3.0), "length_coef": 0.1,
              "length_free": 2}
    run(workdir, **changes(path) | {"reward": reward, "stages": (*STAGES[:3], "compare", "preference", *STAGES[3:])})
    for row in read_metrics(workdir / "ppo" / "metrics.jsonl"):
        assert row["score_callable"] == pytest.approx(2.0)
        assert row["score"] == pytest.approx(0.5 * row["score_preference"] + 6.0 + row["score_length"], abs=1e-5)
        assert row["score_length"] <= -0.1 * (row["response_length"] - 2) + 1e-5
    assert read(workdir / "ppo" / "manifest.json")["inputs"].keys() == {"sft", "preference"}


ARITHMETIC = {
    "compile_cache": None, "data": {"source": "arithmetic"}, "arithmetic": {"largest": 3, "held_out_share": 0.2},
    "model": CONFIG["model"] | {"max_length": 16}, "pretrain": {"steps": 0}, "reward": {"source": "verifier"},
    "stages": ("pretrain", "ppo", "evaluate"),
    "ppo": {"iterations": 2, "batch": 16, "group_size": 4, "advantages": "grpo", "max_new_tokens": 3, "missing_eos": "none"},
    "evaluate": {"prompts": 8, "batch": 8, "max_new_tokens": 3},
}


@pytest.mark.slow
def test_arithmetic_from_random_weights_is_verified(tmp_path):
    pipeline.run(from_config_dict(ARITHMETIC | {"stages": (*ARITHMETIC["stages"], "report")}), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The tags are the verdicts of the verifier." in page and "courteous" not in page
    assert read(tmp_path / "pretrain" / "summary.json")["steps"] == 0
    answers = rows(tmp_path, "evaluate")
    assert len(answers) == 6  # three of 16 problems are held out, and two models answer them
    for row in answers:
        wanted = row["columns"]["answer"]
        assert eval(row["messages"][0]["content"]) == int(wanted)
        found = re.findall(r"-?\d+", row["response"])
        assert row["gold"] == {"correct": bool(found) and found[-1] == wanted}
    summary = read(tmp_path / "summary.json")
    assert summary["rates"]["ppo"]["correct"]["total"] == 3 and summary["win_rates"] == []
    assert [row["kept"] for row in read_metrics(tmp_path / "ppo" / "metrics.jsonl")] == [16.0, 16.0]


@pytest.mark.slow
def test_pretraining_can_use_worked_problems(tmp_path):
    config = ARITHMETIC | {"pretrain": {"steps": 60, "batch_rows": 8, "row_length": 64}, "stages": ("pretrain",)}
    pipeline.run(from_config_dict(config), tmp_path)
    summary = read(tmp_path / "pretrain" / "summary.json")
    assert summary["loss_last"] < summary["loss_first"] / 2


@pytest.mark.slow
def test_the_rating_of_the_feedback_model_can_be_the_reward(tmp_path):
    stages = ("pretrain", "revise", "sft", "ppo", "evaluate")
    world = CONFIG["world"] | {"ratings": 0.2}
    run(tmp_path, stages=stages, world=world, reward={"source": "ai_feedback", "max_dropped_share": 1.0},
        feedback={"reasoning": False, "max_outside_mass": 1.0})
    found = read_metrics(tmp_path / "ppo" / "metrics.jsonl")
    assert all(-1 <= row["score"] <= 1 and row["kept"] > 0 for row in found)
    assert read(tmp_path / "ppo" / "manifest.json")["inputs"].keys() == {"pretrain", "sft"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"source": "verifier"}}, "there are no expected answers"),
        ({"reward": {"source": "ai_feedback"}}, "world.ratings is 0"),
        ({"reward": {"source": "preference+callable", "callable": "a.py:b", "weights": (1.0,)}}, "weights has 1 entries"),
        ({"reward": {"source": "preference+preference"}}, "contains 'preference' twice"),
        ({"data": {"source": "arithmetic"}}, "stage revise needs red-team prompts"),
        ({"data": {"source": "arithmetic"}, "stages": ("pretrain", "ppo")}, "there is no preference model"),
        ({"data": {"source": "prompts_jsonl"}}, "rl and train are empty"),
        ({"data": {"source": "prompts_jsonl", "train": "x.jsonl"}, "stages": ("ppo",), "reward": {"source": "verifier"}},
         "no text to train a tokenizer"),
    ],
)
def test_an_unavailable_reward_is_refused_before_the_run(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(changes)


@pytest.mark.slow
@pytest.mark.parametrize("ppo", [{"critic": "shared", "sampler_correction": "truncate"}, {"advantages": "vtrace"}])
def test_other_critics_and_corrections_run_as_a_stage(done, tmp_path, ppo):
    workdir = started(done, tmp_path / "run")
    for stage in ("compare", "preference"):
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, stages=(*STAGES[:3], "compare", "preference", *STAGES[3:]), ppo=CONFIG["ppo"] | ppo)
    metrics = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert np.isfinite([row["value_loss"] for row in metrics]).all()
    assert ("effective_sample_share" in metrics[0]) == ("sampler_correction" in ppo)
    assert all(check["passed"] for check in read(workdir / "ppo" / "checks.json"))
    assert read(workdir / "summary.json")["models"][-1] == "ppo"  # evaluation read it as a plain policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo": {"advantages": "vtrace", "sampler_correction": "mask"}}, "already correct for the sampler"),
        (ARITHMETIC | {"mesh": {"tensor": 2}}, "only a few characters: use mesh.data"),
        (ARITHMETIC | {"reward": {"source": "verifier", "verifier": "regex_match"}}, "reads a column of patterns"),
        ({"reward": {"length_free": 3}}, "length_free is 3, which has no effect when config.reward.length_coef is 0.0"),
        ({"data": {"weights": (1.0,)}}, "weights is .*, which has no effect when config.data.source is 'world'"),
    ],
)
def test_options_without_effect_or_that_would_fail_later_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(changes)


@pytest.mark.slow
def test_the_parts_of_a_sum_are_means_over_all_scored_rows(done, tmp_path):
    """Groups of equal scores are dropped from the loss, not from the metrics."""
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    return [2.0] * len(responses)\n")
    workdir = started(done, tmp_path / "run")
    config = changes(path, length_coef=0.1) | {"stages": STAGES[:4]}
    run(workdir, **config | {"ppo": config["ppo"] | {"skip_equal_groups": True, "missing_eos": "none", "max_new_tokens": 4}})
    for row in read_metrics(workdir / "ppo" / "metrics.jsonl"):
        assert row["score"] == pytest.approx(2.0 + row["score_length"], abs=1e-5)


@pytest.mark.slow
def test_the_base_for_human_dialogues_can_be_pretrained_on_text_of_the_world(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"chosen": "Human: a\\n\\nAssistant: b", "rejected": "Human: a\\n\\nAssistant: c"}\n')
    run(tmp_path / "run", stages=("pretrain",), data={"source": "preferences_jsonl", "train": str(path)})
    assert load_tokenizer(tmp_path / "run" / "pretrain" / "tokenizer.model").decode([200, 201]) != ""
    assert read(tmp_path / "run" / "pretrain" / "summary.json")["steps"] == 60
