"""Stages ppo and online_dpo under config.placement: the same results, also resumed under another one, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.planner.placed_runs import placed_ppo
from jaxalign.planner.placement_auto import AutoPlacement
from jaxalign.planner.shapes import policy_model
from jaxalign.rl.iteration import Iteration
from jaxalign.stages.shared import placements
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.run_models import sharding
from jaxalign.tracking.device_times import FILE, read_device_times
from jaxalign.tracking.metrics import read_metrics
from tests.stages import ppo_of_prompts
from tests.stages.ppo_of_prompts import REWARD, write_inputs

pytestmark = pytest.mark.mesh

SEPARATE = {"strategy": "separate"}
CUSTOM = {"strategy": "custom", "roles": (
    "policy=0-1:data=2", "critic+value=2-3:data=2", "reference=4-5", "generator=6-7:data=2",
)}


def config(folder, *args, **fields):
    """Without the checks before the first update, which tests/rl/test_placed.py has."""
    values = ppo_of_prompts.config(folder, *args)
    return values | {"ppo": values["ppo"] | {"checks": {"step_zero": False}}} | fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_sampling_programs):
    return write_inputs(tmp_path_factory.mktemp("placed"))


@pytest.fixture(scope="module")
def flat(folder):
    """The work directory of a finished run on one device."""
    pipeline.run(from_config_dict(config(folder)), folder / "flat")
    return folder / "flat"


def run_and_stop(monkeypatch, updates, config, workdir):
    """Run the stages, and stop by Ctrl-C in the update after `updates` updates."""
    update, done = Iteration.update, []

    def fail(self, *args):
        if len(done) == updates:
            raise KeyboardInterrupt
        done.append(1)
        return update(self, *args)

    with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017, PT011
        patch.setattr(Iteration, "update", fail)
        pipeline.run(config, workdir)


@pytest.mark.slow
def test_a_run_with_adapters_that_is_stopped_goes_on_under_another_placement(folder, flat, monkeypatch):
    run_and_stop(monkeypatch, 2, from_config_dict(config(folder)), folder / "cut")
    assert len(read_metrics(folder / "cut" / "ppo" / "metrics.jsonl")) == 2
    pipeline.run(from_config_dict(config(folder, CUSTOM)), folder / "cut")
    found, wanted = (read_metrics(run / "ppo" / "metrics.jsonl") for run in (folder / "cut", flat))
    assert len(found) == len(wanted) == 3
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("score", "reward", "kl_k1", "policy_loss", "value_loss", "grad_norm", "critic_grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name
    timed = read_device_times(folder / "cut" / "ppo" / FILE)
    assert [(row.iteration, list(row.groups)) for row in timed] == [(2, ["0-1", "2-3", "4-5", "6-7"])]
    assert FILE not in json.loads((folder / "cut" / "ppo" / "manifest.json").read_text())["outputs"]
    assert not (flat / "ppo" / FILE).exists()
    summary = json.loads((folder / "cut" / "ppo" / "summary.json").read_text())
    assert summary["placement"]["roles"]["policy"] == {"devices": "0-1", "mesh": {"data": 2}}
    assert "placement" not in json.loads((flat / "ppo" / "summary.json").read_text())


AHEAD = {"ppo": {"checks": {"step_zero": False}, "iterations": 4, "batch": 8, "minibatches": 2, "prompts": 16,
                 "max_new_tokens": 8, "checkpoint_every": 2,
                 "temperature": 2.0, "sample_ahead": True, "sampler_correction": "truncate", "advantages": "rloo",
                 "group_size": 2}}


@pytest.mark.slow
def test_pitfall_31_responses_that_are_sampled_ahead_do_not_depend_on_the_placement_or_on_a_resume(folder, monkeypatch):
    pipeline.run(from_config_dict(config(folder, **AHEAD)), folder / "ahead")
    versions, received = [], Iteration._received

    def noted(self, step, rollout):
        versions.append((step, int(rollout.versions[0, 0])))
        return received(self, step, rollout)

    monkeypatch.setattr(Iteration, "_received", noted)
    run_and_stop(monkeypatch, 3, from_config_dict(config(folder, SEPARATE, {"data": 4}, **AHEAD)), folder / "ahead_cut")
    pipeline.run(from_config_dict(config(folder, SEPARATE, {"data": 4}, **AHEAD)), folder / "ahead_cut")
    found, wanted = (read_metrics(folder / run / "ppo" / "metrics.jsonl") for run in ("ahead_cut", "ahead"))
    assert len(found) == len(wanted) == 4
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("score", "kl_k1", "policy_loss", "entropy", "effective_sample_share"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name
    # Iteration 0 has the newest weights, every later one those before the last update, also after the resume at iteration 2.
    assert dict(versions) == {0: 0, 1: 0, 2: 1, 3: 2} and [step for step, _ in versions].count(3) == 2
    assert not (folder / "ahead_cut" / "ppo" / "ahead").exists()
    timed = read_device_times(folder / "ahead_cut" / "ppo" / FILE)
    assert [list(row.groups) for row in timed[1:]] == [["0-3", "4-7"]] * 3


JUDGE = REWARD.with_name("judge.py")


@pytest.mark.slow
def test_online_dpo_gives_the_metrics_of_one_device(folder):
    fields = {
        "stages": ("online_dpo",), "feedback": {"judge": f"{JUDGE}:Brevity"}, "reward": {},
        "online_dpo": {"iterations": 2, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8, "temperature": 2.0},
    }
    roles = ("policy=0-1:data=2", "reference=2-3", "generator=4-7:data=4")
    for name, placement in (("one", None), ("placed", {"strategy": "custom", "roles": roles})):
        pipeline.run(from_config_dict({**config(folder, placement), "ppo": {}, **fields}), folder / "online" / name)
    found, wanted = (read_metrics(folder / "online" / run / "online_dpo" / "metrics.jsonl") for run in ("placed", "one"))
    assert len(found) == len(wanted) == 2
    _, second = read_device_times(folder / "online" / "placed" / "online_dpo" / FILE)
    # The answers of each of the two minibatches are sampled and scored, and each is trained on in each epoch.
    assert [program.name for program in second.on("4-7")] == ["copy of weights", "generate", "generate"]
    assert [program.name for program in second.on("2-3")] == ["reference"] * 2
    assert [program.name for program in second.on("0-1")] == ["log-probabilities"] * 2 + ["policy update"] * 2
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("loss", "decided", "kl", "length", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name


AUTO = {"strategy": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize("choice", [
    AutoPlacement("custom", CUSTOM["roles"], ("sets",), 1.0),
    AutoPlacement("flat", ("policy+critic+reference=0-3:data=4",), ("flat",)),
])
def test_a_resumed_run_keeps_the_placement_that_auto_chose(folder, flat, monkeypatch, capsys, choice):
    run = folder / f"auto_{choice.strategy}"
    monkeypatch.setattr(placements, "choose_attached", lambda *_: choice)
    run_and_stop(monkeypatch, 2, from_config_dict(config(folder, AUTO)), run)
    assert f"[ppo] placement auto: {choice.sentences[0]}\n" in capsys.readouterr().out
    monkeypatch.setattr(placements, "choose_attached", lambda *_: AutoPlacement())
    pipeline.run(from_config_dict(config(folder, AUTO)), run)
    assert "[ppo] placement auto: that of the interrupted run is kept" in capsys.readouterr().out
    found, wanted = (read_metrics(each / "ppo" / "metrics.jsonl") for each in (run, flat))
    assert len(found) == len(wanted) == 3
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("score", "kl_k1", "policy_loss", "value_loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name
    summary = json.loads((run / "ppo" / "summary.json").read_text())
    assert AutoPlacement.from_dict(summary["placement_choice"]) == choice
    assert ("placement" in summary) == (choice.strategy == "custom")  # Only then each role has programs of its own.


@pytest.mark.parametrize("values", [
    {"strategy": "custom", "roles": ["policy+critic+reference=0-63"]},  # This machine has 8 devices.
    {"strategy": "custom", "roles": ["policy=0"]}, {"unknown": 1}, {},
])
def test_a_choice_that_no_longer_works_is_made_again(folder, values):
    made = from_config_dict(config(folder, AUTO))
    run = placed_ppo(made, policy_model(made, sharding(made.mesh)))
    assert placements._earlier(values, made, run) is None
    again = {"strategy": "custom", "roles": ["policy+critic+reference=0-3:data=4"]}
    assert placements._earlier(again, made, run).roles == tuple(again["roles"])


def test_auto_is_flat_on_devices_of_the_cpu(folder, tmp_path, capsys):
    made = from_config_dict(config(folder, AUTO))
    context = StageContext(made, tmp_path, tmp_path, False)
    placed = placements.ppo_placement(context, policy_model(made, sharding(made.mesh)))
    assert placed.shardings is placed.together is None and placed.values["placement_choice"]["strategy"] == "flat"
    assert "CPU devices share the cores of one host" in capsys.readouterr().out
    placements.check_placements(made, {"ppo"})  # Nothing to refuse.
    assert placements.online_dpo_placement(context, None).shardings is None
    assert "the search models the roles of stage ppo only" in capsys.readouterr().out


@pytest.mark.parametrize(("placement", "fields", "message"), [
    ({"strategy": "custom"}, {}, "config.placement.roles is empty; give each role its devices, such as policy"),
    ({"strategy": "custom", "roles": ("policy",)}, {}, "placement entry 'policy' must have roles, devices"),
    (SEPARATE, {"stages": ("evaluate",)}, "config.stages has neither ppo nor online_dpo"),
    (SEPARATE, {"mesh": {"offload": ("optimizer",)}}, "offloading works with strategy flat only"),
    ({}, {"ppo": {"sample_ahead": True, "checks": {"ratio": "stop"}}}, "leave both at 'warn'"),
    ({}, {"ppo": {"sample_ahead": True, "advantages": "remax"}}, "also sample greedy responses with the newest weights"),
    ({"generation_devices": 2}, {}, "config.placement.generation_devices is 2, which has no effect"),
])
def test_a_config_with_a_wrong_placement_is_refused(folder, placement, fields, message):
    with pytest.raises(UserError, match=re.escape(message)):
        from_config_dict(config(folder, placement) | fields)


@pytest.mark.parametrize(("placement", "mesh", "fields", "message"), [
    (SEPARATE, {"data": 2}, {}, "has 2 devices, but policy and critic have 4 (0-3); data=4 would work"),
    ({"strategy": "interleave"}, {"data": 4}, {}, "needs two roles that only score, to run at the same time, but the run has "
     "reference; use flat"),
    ({"strategy": "custom", "roles": ("policy+critic=0-9", "reference=0-3")}, {}, {}, "do not all exist"),
    ({"strategy": "custom", "roles": ("policy+critic=0-2:data=3", "reference=4-5")}, {}, {}, "cannot split a batch of 4 rows"),
    (SEPARATE, {"data": 4},
     {"ppo": {"kl_estimator": "full", "kl_in": "loss", "batch": 8, "minibatches": 2, "max_new_tokens": 8}},
     "ppo.kl_estimator is 'full', which runs the policy and the reference in one program"),
])
def test_a_placement_that_the_devices_do_not_allow_stops_the_stage(folder, tmp_path, placement, mesh, fields, message):
    with pytest.raises(UserError, match=re.escape(message)):
        pipeline.run(from_config_dict(config(folder, placement, mesh) | fields), tmp_path / "run")


def test_a_placement_is_checked_before_any_stage_runs(folder, tmp_path):
    values = config(folder, SEPARATE, {"data": 2}, stages=("compare", "preference", "ppo"), reward={},
                    preference={"max_length": 64}, compare={"max_new_tokens": 8}, feedback={"judge": f"{JUDGE}:Brevity"})
    with pytest.raises(UserError, match=re.escape("has 2 devices, but policy and critic have 4 (0-3)")):
        pipeline.run(from_config_dict(values), tmp_path / "run")
    assert not (tmp_path / "run" / "compare").exists()
