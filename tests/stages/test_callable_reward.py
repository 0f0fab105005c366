"""RL against a callable of the user's own, on a tiny run; and every way in which it may fail."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from tests.stages.test_end_to_end import CONFIG, done, read, run  # noqa: F401

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


def started(done, workdir):  # noqa: F811
    for stage in STAGES[:3]:
        shutil.copytree(done / stage, workdir / stage)
    return workdir


def test_pitfall_20_a_reward_may_be_a_callable(done, tmp_path, caplog):  # noqa: F811
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    workdir = started(done, tmp_path / "run")
    run(workdir, **changes(path))
    rows = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert [row["kept"] for row in rows] == [7.0] * 3  # the NaN of each batch is left out
    assert [row["score"] for row in rows] == pytest.approx([0.73] * 3)  # pitfall 1: not rounded
    assert np.isfinite([row["policy_loss"] for row in rows]).all()
    seen = [eval(line, {"null": None}) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert len(seen) == 24
    prompt, response, name, source = seen[0]
    assert prompt[-1]["role"] == "user" and isinstance(response, str) and source == "rl" and name.startswith("rl-")
    assert [row[2] for row in seen[0::2]] == [row[2] for row in seen[1::2]]  # groups of two stand together
    assert "gave no score for 1 of 8 responses" in caplog.text
    assert read(workdir / "summary.json")["models"] == ["base", "sft", "ppo"]
    path.write_text(GOOD + "\n# changed\n")
    with pytest.raises(UserError, match=r"mine\.py"):
        run(workdir, **changes(path))


def test_a_critic_may_be_had_with_it(done, tmp_path):  # noqa: F811
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, responses, **columns):\n    return [len(r) / 100 for r in responses]\n")
    workdir = started(done, tmp_path / "run")
    run(workdir, **changes(path) | {"ppo": CONFIG["ppo"]})
    rows = read_metrics(workdir / "ppo" / "metrics.jsonl")
    assert all(np.isfinite(row["value_loss"]) for row in rows)


def test_one_that_fails_stops_the_run_with_a_sentence(done, tmp_path):  # noqa: F811
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
        ({"callable": "length.py:brief"}, {}, "set source to 'callable'"),
        ({"source": "callable", "callable": "length.py:brief"}, {"score_clip": 1.0}, "score_clip is 1.0"),
    ],
)
def test_a_callable_is_named_where_it_is_used(reward, ppo, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"reward": reward, "ppo": ppo})
