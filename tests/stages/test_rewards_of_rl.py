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
OPTIMIZER = CONFIG["pretrain"]["optimizer"] | {"schedule": "constant"}
PRETRAIN = CONFIG["pretrain"] | {"steps": 10, "optimizer": OPTIMIZER}
GOOD = """
import json, pathlib
def score(prompts, responses, **columns):
    found = [len(r) * 0.0073 if len(r) % 5 else float("nan") for r in responses]
    with open(pathlib.Path(__file__).with_suffix(".jsonl"), "a") as file:
        names = columns["prompt_id"], columns["source"]
        file.write(json.dumps([[*row[:-1], row[-1] if row[-1] == row[-1] else None]
                               for row in zip(prompts, responses, *names, found)]) + "\\n")
    return found
"""


def changes(path, ppo=(), **reward):
    reward = {"source": "callable", "callable": f"{path}:score", "backoff_s": 0.0, "max_dropped_share": 1.0} | reward
    own = {"checks": {"step_zero": False}, "advantages": "rloo", "group_size": 2, "temperature": 1.3, "max_new_tokens": 72,
           "sampler_correction": "truncate"}
    return {"stages": STAGES, "reward": reward, "ppo": CONFIG["ppo"] | own | dict(ppo)}


def calls_of(path):
    """The calls of the function `score` of GOOD: lists of (prompt, response, prompt ID, source, score or None)."""
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def started(done, workdir, *stages):
    """Copy the first three stages and the given ones of the shared run."""
    for stage in (*STAGES[:3], *stages):
        shutil.copytree(done / stage, workdir / stage)
    return workdir


@pytest.fixture(scope="module")
def scored(done, tmp_path_factory):
    """(the file of a reward function, the work directory of a finished run with it). Tests must not change them."""
    folder = tmp_path_factory.mktemp("callable")
    path = folder / "mine.py"
    path.write_text(GOOD)
    run(started(done, folder / "run"), **changes(path))
    return path, folder / "run"


@pytest.mark.slow
def test_pitfall_20_a_reward_can_be_a_callable(scored):
    path, workdir = scored
    metrics = read_metrics(workdir / "ppo" / "metrics.jsonl")
    calls = calls_of(path)
    seen, asked = ([call for call in calls if (call[0][3] == "rl") == own] for own in (True, False))
    assert [len(call) for call in seen] == [8] * 3 and len(asked) > 0
    scores = [[row[4] for row in call if row[4] is not None] for call in seen]
    assert [row["kept"] for row in metrics] == [len(kept) for kept in scores]  # rows whose score is NaN are dropped
    assert min(len(kept) for kept in scores) < 8
    assert [row["score"] for row in metrics] == pytest.approx([np.mean(kept) for kept in scores])  # scores are not rounded
    assert np.isfinite([row["policy_loss"] for row in metrics]).all() and "effective_sample_share" in metrics[0]
    rewards = {}
    for row in rows(workdir, "evaluate"):
        if len(row["response"]) % 5:
            rewards.setdefault(row["model"], []).append(len(row["response"]) * 0.0073)
    assert read(workdir / "summary.json")["reward"] == pytest.approx({name: np.mean(own) for name, own in rewards.items()})
    prompt, response, name, source, _ = seen[0][0]
    assert prompt[-1]["role"] == "user" and isinstance(response, str) and source == "rl" and name.startswith("rl-")
    names = [row[2] for call in seen for row in call]
    assert names[0::2] == names[1::2]  # groups of two are contiguous
    assert read(workdir / "summary.json")["models"] == ["base", "sft", "ppo"]
    assert {"changes", "rl"} <= set(check_links(render_report(workdir)))


@pytest.mark.slow
def test_a_changed_callable_is_a_changed_run(scored):
    path, workdir = scored
    path.write_text(GOOD + "\n# changed\n")
    try:
        with pytest.raises(UserError, match=r"mine\.py"):
            run(workdir, **changes(path))
    finally:
        path.write_text(GOOD)


@pytest.mark.slow
def test_a_callable_that_fails_stops_the_run_with_a_sentence(done, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    raise RuntimeError('no such model')\n")
    workdir = started(done, tmp_path / "run")
    with pytest.raises(UserError, match=r"gave no score for 8 of 8 responses .*no such model.* more than"):
        run(workdir, **changes(path, max_dropped_share=0.5))


SCORES_TWICE = """
import pathlib
def score(prompts, responses, **columns):
    calls = pathlib.Path(__file__).with_suffix(".calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    return [float(len(r)) for r in responses] if len(calls.read_text()) < 3 else [None] * len(responses)
"""


@pytest.mark.slow
def test_an_iteration_without_a_score_is_not_shown_as_a_score_of_0(done, tmp_path):
    path, workdir = tmp_path / "mine.py", started(done, tmp_path / "run")
    path.write_text(SCORES_TWICE)
    run(workdir, **changes(path) | {"stages": STAGES[:4]})
    *before, last = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert [row["no_score"] for row in (*before, last)] == [0, 0, 8] and last["kept"] == 0
    assert np.isnan([last[name] for name in ("score", "reward", "kl_k1", "response_length", "policy_loss", "entropy")]).all()
    summary = read(workdir / "ppo" / "summary.json")
    assert (summary["score_first"], summary["score_last"]) == (before[0]["score"], None)
    page = render_report(workdir).read_text()
    assert "in stage ppo, 8 of 24 responses (33.3%) had no score" in page
    assert f"{before[0]['score']:.2f} in the first iteration with a score and {before[1]['score']:.2f} in the last" in page
    assert "is nan at step" not in page


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


@pytest.mark.slow
def test_a_callable_can_run_while_other_responses_are_sampled(done, scored, tmp_path, caplog):
    """It gets more calls of fewer rows: each row once, and every score reaches its row."""
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    run(started(done, tmp_path / "run"), **changes(path, while_sampling=True) | {"stages": STAGES[:4]})
    late, early = scored[1], tmp_path / "run"
    assert read_metrics(early / "ppo" / "metrics.jsonl") == read_metrics(late / "ppo" / "metrics.jsonl")
    usual = [call for call in calls_of(scored[0]) if call[0][3] == "rl"]
    assert len(usual) == 3 < len(calls_of(path))
    for call in usual:
        if lost := sum(row[4] is None for row in call):
            assert f"gave no score for {lost} of 8 responses" in caplog.text
    asked = [sorted((row[2], row[1]) for call in calls for row in call) for calls in (usual, calls_of(path))]
    assert asked[1] == asked[0] and len(asked[0]) == 24


ALL = (*STAGES[:3], "compare", "preference", *STAGES[3:])


@pytest.fixture(scope="module")
def summed(done, tmp_path_factory):
    """A finished run whose reward is a sum, with a shared critic and V-trace. Tests must not change it."""
    folder = tmp_path_factory.mktemp("sum")
    path = folder / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    return [2.0] * len(responses)\n")
    reward = {"source": "preference+callable", "callable": f"{path}:score", "weights": (0.5, 3.0), "length_coef": 0.1,
              "length_free": 2}
    workdir = started(done, folder / "run", "compare", "preference")
    run(workdir, stages=ALL, reward=reward, ppo=CONFIG["ppo"] | {"critic": "shared", "advantages": "vtrace"})
    return workdir


@pytest.mark.slow
def test_a_shared_critic_and_v_trace_run_as_a_stage(summed):
    metrics = read_metrics(summed / "ppo" / "metrics.jsonl")
    assert np.isfinite([row["value_loss"] for row in metrics]).all() and "effective_sample_share" not in metrics[0]
    checks = read(summed / "ppo" / "checks.json")
    assert len(checks) == 5 and all(check["passed"] for check in checks)
    assert read(summed / "summary.json")["models"][-1] == "ppo"  # evaluation read it as a plain policy


@pytest.mark.slow
def test_a_sum_has_weights_and_a_length_penalty_and_reports_its_parts(summed):
    for row in read_metrics(summed / "ppo" / "metrics.jsonl"):
        assert row["score_callable"] == pytest.approx(2.0)
        assert row["score"] == pytest.approx(0.5 * row["score_preference"] + 6.0 + row["score_length"], abs=1e-5)
        assert row["score_length"] <= -0.1 * (row["response_length"] - 2) + 1e-5
    assert read(summed / "ppo" / "manifest.json")["inputs"].keys() == {"sft", "preference"}


ARITHMETIC = {
    "compile_cache": None, "data": {"source": "arithmetic"}, "arithmetic": {"largest": 3, "held_out_share": 0.2},
    "model": CONFIG["model"] | {"max_length": 16}, "pretrain": {"steps": 0}, "reward": {"source": "verifier"},
    "stages": ("pretrain", "ppo", "evaluate", "report"),
    "ppo": {"checks": {"step_zero": False},
            "iterations": 2, "batch": 16, "group_size": 4, "advantages": "grpo", "max_new_tokens": 3, "missing_eos": "none"},
    "evaluate": {"prompts": 8, "batch": 8, "max_new_tokens": 3},
}


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """A finished run on arithmetic whose groups of equal scores are dropped from the loss. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("arithmetic")
    ppo, reward = ARITHMETIC["ppo"] | {"skip_equal_groups": True}, ARITHMETIC["reward"] | {"length_coef": 0.1}
    pipeline.run(from_config_dict(ARITHMETIC | {"ppo": ppo, "reward": reward}), workdir)
    return workdir


@pytest.mark.slow
def test_arithmetic_from_random_weights_is_verified(verified):
    page = (verified / "report.html").read_text(encoding="utf-8")
    assert "The tags are the verdicts of the verifier." in page and "courteous" not in page
    assert read(verified / "pretrain" / "summary.json")["steps"] == 0
    answers = rows(verified, "evaluate")
    assert len(answers) == 6  # three of 16 problems are held out, and two models answer them
    for row in answers:
        wanted = row["columns"]["answer"]
        assert eval(row["messages"][0]["content"]) == int(wanted)
        found = re.findall(r"-?\d+", row["response"])
        assert row["gold"] == {"correct": bool(found) and found[-1] == wanted}
    summary = read(verified / "summary.json")
    assert summary["rates"]["ppo"]["correct"]["total"] == 3 and summary["win_rates"] == []


@pytest.mark.slow
def test_the_parts_of_a_sum_are_means_over_all_scored_rows(verified):
    """Groups of equal scores are dropped from the loss, not from the metrics."""
    metrics = read_metrics(verified / "ppo" / "metrics.jsonl")
    for row in metrics:
        assert 0 < row["kept"] < 16 and row["kept"] % 4 == 0
        assert row["score_length"] == pytest.approx(-0.1 * row["response_length"])
    # The numbers of correct answers, of 16 in each iteration, also of those in groups of equal scores.
    correct = [16 * (row["score"] - row["score_length"]) for row in metrics]
    assert max(correct) > 0.5 and correct == pytest.approx(np.round(correct), abs=1e-4)


@pytest.mark.slow
def test_pretraining_can_use_worked_problems(tmp_path):
    config = ARITHMETIC | {"pretrain": {"steps": 60, "batch_rows": 8, "row_length": 64}, "stages": ("pretrain",)}
    pipeline.run(from_config_dict(config), tmp_path)
    summary = read(tmp_path / "pretrain" / "summary.json")
    assert summary["loss_last"] < summary["loss_first"] / 2


@pytest.mark.slow
def test_the_rating_of_the_feedback_model_can_be_the_reward(tmp_path):
    world, reward = CONFIG["world"] | {"ratings": 0.2}, {"source": "ai_feedback", "max_dropped_share": 1.0}
    run(tmp_path, **changes("") | {"reward": reward}, world=world, feedback={"reasoning": False, "max_outside_mass": 1.0},
        pretrain=PRETRAIN, revise=CONFIG["revise"] | {"red_team_prompts": 4, "helpful_prompts": 12, "rounds": 1},
        sft=CONFIG["sft"] | {"keep": ("unchanged", "cut_off")})
    found = read_metrics(tmp_path / "ppo" / "metrics.jsonl")
    assert np.isfinite([row["policy_loss"] for row in found]).all()
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
def test_the_base_for_human_dialogues_can_be_pretrained_on_text_of_the_world(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"chosen": "Human: a\\n\\nAssistant: b", "rejected": "Human: a\\n\\nAssistant: c"}\n')
    run(tmp_path / "run", stages=("pretrain",), pretrain=PRETRAIN, data={"source": "preferences_jsonl", "train": str(path)})
    assert load_tokenizer(tmp_path / "run" / "pretrain" / "tokenizer.model").decode([200, 201]) != ""
    assert read(tmp_path / "run" / "pretrain" / "summary.json")["steps"] == 10
