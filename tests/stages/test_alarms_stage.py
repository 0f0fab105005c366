"""The alarms of stage ppo on tiny runs: a reward for short answers makes the policy collapse, and an alarm ends RL."""

from __future__ import annotations

import shutil

import chex
import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.rl.alarms import AlarmRun
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.run_models import load_tokenizer, make_model
from jaxalign.steps.checkpoint import load_params
from jaxalign.tracking.metrics import read_metrics
from tests import tiny
from tests.small_run import CONFIG, read

pytestmark = pytest.mark.slow

PPO = {"checks": {"step_zero": False},
       "iterations": 6, "kl_coef": 0.0, "batch": 8, "minibatches": 1, "epochs": 1, "prompts": 16, "max_new_tokens": 16,
       "checkpoint_every": 2, "advantages": "rloo", "group_size": 2, "missing_eos": "none", "temperature": 1.0,
       "optimizer": {"learning_rate": 1e-2, "schedule": "constant"}}
ALARMS = {"every": 1, "prompts": 6, "action": "best", "min_length_ratio": 0.7}
BRIEF = "def brief(prompts, responses, **columns):\n    return [-len(response) / 10 for response in responses]\n"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A work directory with a pretrained base, and a reward for short answers."""
    workdir = tmp_path_factory.mktemp("start")
    (workdir / "brief.py").write_text(BRIEF)
    pipeline.run(from_config_dict(CONFIG | {"stages": ("pretrain",)}), workdir / "run")
    return workdir


def config(start, iterations=PPO["iterations"], stages=("pretrain", "ppo"), **alarms):
    ppo = PPO | {"iterations": iterations, "alarms": ALARMS | alarms}
    reward = {"source": "callable", "callable": f"{start / 'brief.py'}:brief", "backoff_s": 0.0}
    return from_config_dict(CONFIG | {"stages": stages, "reward": reward, "ppo": ppo})


def run(start, workdir, *args, **alarms):
    if not workdir.exists():
        shutil.copytree(start / "run", workdir)
    settings = config(start, *args, **alarms)
    pipeline.run(settings, workdir)
    return workdir / "ppo"


def params(start, folder):
    context = StageContext(config(start), folder.parent, folder, False)
    return tiny.to_host(load_params(folder / "params", make_model(context.config, load_tokenizer(context).vocab_size)))


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The stage's folder of an uninterrupted run, which an alarm ends."""
    return run(start, tmp_path_factory.mktemp("whole") / "run", stages=("pretrain", "ppo", "report"))


def test_pitfall_32_a_collapse_of_the_length_fires_the_alarm_and_ends_rl(whole):
    alarms, metrics = read(whole / "summary.json")["alarms"], read_metrics(whole / "metrics.jsonl")
    (fired,) = [one for one in alarms["fired"] if one["alarm"] == "short"]
    lengths = [one["length"] for one in alarms["measurements"]]
    assert fired["limit"] == pytest.approx(0.7 * lengths[0]) and fired["value"] == lengths[fired["since"]] < fired["limit"]
    assert len(metrics) == alarms["fired"][0]["iteration"] < PPO["iterations"]
    assert [one["iteration"] for one in alarms["measurements"]] == list(range(len(metrics) + 1))
    assert metrics[0]["alarm/start_length"] == lengths[0] and metrics[-1]["alarm/length"] == lengths[-1]


def test_the_result_is_the_best_policy_before_the_alarm(start, whole, tmp_path):
    """A run of as many iterations as were kept has the same parameters."""
    alarms = read(whole / "summary.json")["alarms"]
    before = [one for one in alarms["measurements"][1:] if one["length"] >= 0.7 * alarms["measurements"][0]["length"]]
    assert alarms["kept"] == max(before, key=lambda one: one["score"])["iteration"] > 0
    shorter = run(start, tmp_path / "run", alarms["kept"], action="warn")
    assert read(shorter / "summary.json")["alarms"]["fired"] == []
    chex.assert_trees_all_equal(params(start, whole), params(start, shorter))


@pytest.mark.parametrize("place", ["a step after the first checkpoint", "the end of RL"])
def test_a_killed_and_resumed_run_is_equal(start, whole, tmp_path, monkeypatch, place):
    step = AlarmRun.step

    def killed(self, iteration, state, number):
        if number == 2:
            raise KeyboardInterrupt
        return step(self, iteration, state, number)

    with monkeypatch.context() as patch:
        if place == "the end of RL":
            patch.setattr("jaxalign.stages.ppo.save_params", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            patch.setattr(AlarmRun, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(start, tmp_path / "run", stages=("pretrain", "ppo", "report"))
    again = run(start, tmp_path / "run", stages=("pretrain", "ppo", "report"))
    for name in ("metrics.jsonl", "summary.json", "alarm-answers-00000.jsonl"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    chex.assert_trees_all_equal(params(start, again), params(start, whole))


def test_stop_ends_the_run_after_a_checkpoint_and_does_not_go_on(start, whole, tmp_path):
    ended = len(read_metrics(whole / "metrics.jsonl"))
    for _ in range(2):
        with pytest.raises(UserError, match="mean length of answers to harmless prompts was .*action is 'stop'"):
            run(start, tmp_path / "run", action="stop")
        assert (tmp_path / "run" / "ppo" / "checkpoints" / f"{ended}").exists()
        assert (tmp_path / "run" / "ppo" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_the_report_states_the_alarm(whole):
    page = (whole.parent / "report.html").read_text(encoding="utf-8")
    assert read(whole / "summary.json")["alarms"]["fired"][0]["sentence"] in page
    assert "Held-out helpful prompts" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo": {"alarms": {"patience": 3}}}, "patience is 3, which has no effect when config.ppo.alarms.every is 0"),
        ({"ppo": {"alarms": {"every": 2, "min_win_rate": 0.4}}}, "min_win_rate is 0.4, which has no effect"),
        ({"ppo": {"alarms": {"every": 2, "refusals": ("(",)}}}, r"refusals has '\(', which is not a regular expression"),
        ({"ppo": {"alarms": {"every": 2}}, "data": {"source": "arithmetic"}, "stages": ("pretrain", "ppo"),
          "reward": {"source": "verifier"}}, "'arithmetic' has none"),
        ({"ppo": {"helpful_share": 0.5}}, "helpful_share is 0.5, but config.data.helpful is empty"),
    ],
)
def test_alarms_without_effect_or_without_helpful_prompts_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(changes)
