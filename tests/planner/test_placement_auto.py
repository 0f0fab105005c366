"""The placement that a run with config.placement.strategy=auto chooses, and its reasons."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest

from jaxalign.config import from_config_dict
from jaxalign.placement.custom import parse_entry
from jaxalign.plan import read_config
from jaxalign.planner import placement_auto
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import Cluster, chips, gpu_cluster
from jaxalign.planner.placement_auto import AutoPlacement, ahead_seconds, attached_cluster, choose, choose_attached
from jaxalign.planner.placement_choices import placement_choices
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model

LLAMA = ("--config=configs/real_size.py:llama31_8b_h100x8", "--config.model.path=unread", "--config.data.train=unread",
         "--config.stages=ppo", "--config.reward.source=callable", "--config.reward.callable=mine.py:score",
         "--config.placement.strategy=auto")
SMALL = ("--config=configs/grpo.py", "--config.preference.members=1", "--config.stages=ppo",
         "--config.reward.source=callable", "--config.reward.callable=mine.py:score")


def given(*arguments: str, gpus="H100x8", shape="Llama-3.1-8B") -> Given:
    config = read_config(["plan", *arguments], shape)
    policy = policy_model(config, abstract_sharding(config.mesh), shape or None)
    return Given(config, policy, gpu_cluster(gpus), prompt=512 if shape else None)


@pytest.fixture(scope="module")
def on_h100() -> AutoPlacement:
    return choose(given(*LLAMA))


def test_the_choice_saves_time_and_fits(on_h100):
    roles = [role for entry in on_h100.roles for role in parse_entry(entry).roles]
    assert {"policy", "critic", "reference"} <= set(roles)
    assert on_h100.seconds <= 0.95 * on_h100.flat_seconds and on_h100.peak <= 78.3e9
    (sentence,) = on_h100.sentences
    for number in (f"{on_h100.seconds:.3g} s", f"{on_h100.flat_seconds:.3g} s", f"{on_h100.peak / 1e9:.3g} GB",
                   "78.3 GB usable", "flat on config.mesh (fsdp=8)"):
        assert number in sentence


def test_the_time_and_the_memory_of_flat_are_those_of_the_plan(on_h100):
    plan = given(*LLAMA, "--config.placement.strategy=flat").estimate()
    # 200 iterations. A role's time adds the latency of collectives, which the plan leaves out.
    assert on_h100.flat_seconds == pytest.approx(plan.seconds / 200, rel=0.1) and on_h100.flat_peak == plan.peak


def test_the_micro_batches_are_those_of_the_run(on_h100):
    """The search of a plan may change them, so it is never slower."""
    best = placement_choices(given(*LLAMA, "--config.placement.strategy=flat")).best[0]
    assert best.found.seconds <= on_h100.seconds


def test_flat_on_config_mesh_is_kept_if_others_save_little():
    first = choose(given(*SMALL, gpus="L4x8", shape=""))
    (entry,) = first.roles  # All roles on another mesh than the single device of the config, with the programs of flat.
    assert first.strategy == "flat" and parse_entry(entry).devices.count == 8
    axes = [f"--config.mesh.{axis}={size}" for axis, size in parse_entry(entry).mesh.items() if size > 1]
    second = choose(given(*SMALL, *axes, gpus="L4x8", shape=""))
    assert (second.strategy, second.roles) == ("flat", ()) and second.seconds == second.flat_seconds
    assert second.seconds == pytest.approx(first.seconds) and "the fastest other placement takes" in second.sentences[0]


def test_a_run_that_does_not_fit_says_so():
    chosen = choose(given(*LLAMA, "--config.mesh.fsdp=1", gpus="H100x8"))
    assert chosen.flat_peak > 80e9 and "too much" in chosen.sentences[0] and chosen.peak <= 80e9 and chosen.roles


@pytest.mark.parametrize(("arguments", "gpus", "sentence"), [
    (("--config.mesh.offload=optimizer",), "L4x8", "which works with strategy flat only"),
    (("--config.mesh.generation=training", "--config.mesh.fsdp=4"), "L4x8", "'training', and the search models 'tensor' only"),
    ((), "L4x1", "one device has only strategy flat"),
])
def test_a_run_that_the_search_does_not_model_stays_flat_with_one_sentence(arguments, gpus, sentence):
    chosen = choose(given(*SMALL, *arguments, gpus=gpus, shape=""))
    assert (chosen.strategy, chosen.roles, chosen.seconds) == ("flat", (), None)
    assert len(chosen.sentences) == 1 and chosen.sentences[0].startswith("flat, because ") and sentence in chosen.sentences[0]


def test_sample_ahead_is_mentioned_and_not_set(monkeypatch):
    quick = dataclasses.replace
    monkeypatch.setattr(placement_auto, "ahead_seconds", lambda found: quick(found, seconds=0.001).seconds)
    small = given(*SMALL, "--config.ppo.micro_batch_tokens=0", gpus="L4x8", shape="")
    assert choose(small).sentences[1].startswith("config.ppo.sample_ahead=True would take 0.001 s per iteration")
    # With sample_ahead in the config, placements with a generator are candidates with these times.
    ppo = dataclasses.replace(small.config.ppo, sample_ahead=True)
    chosen = choose(dataclasses.replace(small, config=dataclasses.replace(small.config, ppo=ppo)))
    assert len(chosen.sentences) == 1 and chosen.seconds == 0.001 and any("generator" in entry for entry in chosen.roles)


@pytest.mark.parametrize(("scores", "seconds"), [
    (0.0, 3 + max(10, 2 + 7)),  # The generator's devices only sample: at the same time as scoring (2) and the update (7).
    (2.0, 3 + 2 + max(10, 7)),  # They also score, before they sample.
])
def test_sampling_ahead_overlaps_what_runs_on_other_devices(scores, seconds):
    scoring = {"reference": scores} if scores else {}
    sides = [types.SimpleNamespace(phases={"generation": {"generator": 10.0}, "scoring": scoring, "training": {}}),
             types.SimpleNamespace(phases={"generation": {}, "scoring": {}, "training": {"policy": 7.0}})]
    found = types.SimpleNamespace(phases={"generation": 10.0, "scoring": 2.0, "training": 7.0}, sets=sides, moved=3.0)
    assert ahead_seconds(found) == seconds


def device(kind="NVIDIA H100 80GB HBM3", platform="gpu", limit=None, process=0):
    stats = None if limit is None else {"bytes_limit": limit}
    return types.SimpleNamespace(device_kind=kind, platform=platform, process_index=process, memory_stats=lambda: stats)


def test_the_devices_of_a_run_as_a_cluster():
    cluster, sentence = attached_cluster([device()] * 4)
    assert cluster == Cluster(chips()["H100-80"], (4,), 1, chips()["H100-80"].usable) and not sentence
    cluster, _ = attached_cluster([device(limit=60_000_000_000), device(limit=59_000_000_000)])
    assert cluster.usable == cluster.chip.usable == 59e9 and cluster.chip.hbm == chips()["H100-80"].hbm
    cluster, _ = attached_cluster([device("TPU v5 lite", "tpu", limit=1)] * 8)
    assert (cluster.chip.name, cluster.shape, cluster.usable) == ("v5e", (2, 4), 15.75 * 2**30)


def test_devices_that_the_planner_does_not_know():
    cluster, sentence = attached_cluster([device("NVIDIA X1000", limit=10**11)] * 8)
    assert cluster.devices == 8 and cluster.usable == 1e11 and cluster.chip.name == "H100-80"
    assert sentence == "the planner does not know NVIDIA X1000, so the times are those of as many H100-80"
    assert attached_cluster([device("cpu", "cpu")] * 8) == (
        None, "CPU devices share the cores of one host, so no placement is faster than another")
    assert "unlike kinds" in attached_cluster([device(), device("NVIDIA L4")])[1]


def test_several_processes_stay_flat():
    chosen = choose_attached(None, None, [device(process=0), device(process=1)])
    assert chosen.sentences == ("flat, because this run has several processes, in which only strategy flat works",)


def test_a_choice_is_stored_as_json(on_h100):
    assert AutoPlacement.from_dict(json.loads(json.dumps(on_h100.to_dict()))) == on_h100


def test_the_config_accepts_auto_with_arrays_in_host_memory():
    fields = {"stages": ("ppo",), "placement": {"strategy": "auto"}, "mesh": {"offload": ("optimizer",)}}
    assert from_config_dict(fields).placement.strategy == "auto"
