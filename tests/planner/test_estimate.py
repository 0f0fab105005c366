"""Whole plans: runs that fit and do not fit, the effect of each change, and the texts of errors."""

from __future__ import annotations

import dataclasses
import re

import pytest
from planner.planned import given

from jaxalign.errors import UserError
from jaxalign.planner import search
from jaxalign.planner.estimate import Assumptions, TaskEstimator
from jaxalign.planner.hardware import gpu_cluster
from jaxalign.planner.prices import read_prices
from jaxalign.planner.report import money, to_json, verdict


def peaks(plan: search.Given) -> dict[str, float]:
    return {task.task.name: task.peak for task in plan.estimate().tasks}


def test_sixteen_gigabytes_of_gathered_weights_do_not_fit_a_v5e():
    """8B parameters in bfloat16, gathered on each device to sample: 16 GB of a device that has 16.9."""
    whole = given("v5e:4x4").estimate()
    assert not whole.fits and "It does not fit: ppo generate needs" in verdict(whole)
    split = given("v5e:4x4", "--config.mesh.generation=training").estimate()
    assert split.fits and verdict(split).startswith("It fits")


def test_weights_that_stay_on_a_device_throughout_ppo():
    plan = given("v5e:4x4", "--config.mesh.generation=training").estimate()
    update = next(task for task in plan.tasks if task.task.name == "ppo update")
    # Adapters of rank 16, float32: fsdp splits the side that has the model's width (one of two in each of seven kernels).
    split, whole = 7 * 4096, 2 * 4096 + 2 * 1024 + 3 * 14336
    assert update.resident["policy"] == 32 * 16 * 4 * (split / 16 + whole)
    assert update.resident["policy's optimizer"] == 2 * update.resident["policy"]
    assert update.resident["frozen base"] == pytest.approx(2 * 8_030_261_248 / 16, rel=0.01)
    assert set(update.resident) == {
        "policy", "policy's optimizer", "critic", "critic's optimizer", "reference", "preference model", "frozen base"
    }


def test_each_way_to_save_memory_saves_memory():
    def of(*flags):
        return peaks(given("v5p:2x2x4", "--config.ppo.batch=1024", *flags))["ppo update"]

    base = of()
    assert of("--config.ppo.micro_batch_tokens=768") < base < of(f"--config.ppo.micro_batch_tokens={1 << 16}")
    assert of("--config.model.remat=False") > base
    assert of("--config.lora.rank=0", "--config.lora.base=float32") > base > of("--config.lora.base=nf4")


def test_a_tpu_casts_and_gathers_a_reward_model_of_the_scoring_program_before_its_loop():
    flags = ("--config.lora.rank=0", "--config.lora.base=float32", "--config.mesh.data=1", "--config.mesh.fsdp=8",
             "--config.mesh.tensor=1", "--config.ppo.micro_batch_tokens=768")
    plan = given("v5e:2x4", *flags, shape="Llama-3.2-1B")
    task = next(each.task for each in plan.estimate().tasks if each.task.name == "ppo score")
    for cluster, added in ((plan.cluster, True), (gpu_cluster("H100x8"), False)):
        estimator = TaskEstimator(plan.config, plan.policy, cluster, Assumptions())
        together, alone = (estimator.of(each, ()).temporary["casts"] for each in (task, dataclasses.replace(task, fused=())))
        # In bfloat16: the table on each device, and an eighth of the other weights. The model has 1,235,814,400 parameters.
        table = 128_256 * 2_048
        expected = 2 * table + 2 * (1_235_814_400 - table) / 8 if added else 0
        assert together - alone == pytest.approx(expected, rel=0.001)


def test_time_is_the_largest_of_three_parts_and_falls_with_higher_utilisation():
    plan = given("v5p:2x2x4")
    for task in plan.estimate().tasks:
        assert task.seconds >= 0.999 * max(task.compute, task.memory, task.network)
    faster = dataclasses.replace(plan, assumptions=Assumptions(1.0, 1.0, 1.0)).estimate()
    assert faster.seconds < plan.estimate().seconds


def test_a_pipeline_has_a_bubble():
    """(m + p - 1) / m times the time of one stage, for m micro-batches in p stages."""
    flags = ("--config.mesh.fsdp=4", f"--config.ppo.micro_batch_tokens={4 * 768}", "--config.sft.batch_rows=16",
             "--config.preference.micro_batch_tokens=0", "--config.ppo.minibatches=1")
    plain = given("v5p:2x2x4", *flags, "--config.mesh.data=4").estimate()
    staged = given("v5p:2x2x4", *flags, "--config.mesh.pipeline=4").estimate()

    def of(run):
        return next(task.compute / task.work.flops for task in run.tasks if task.task.name == "ppo update")

    assert of(staged) / of(plain) == pytest.approx((4 + 4 - 1) / 4)


@pytest.mark.parametrize(("topology", "flags", "sentence"), [
    ("v5e:2x4", (), "asks for 16 devices, but v5e:2x4 has 8"),
    ("v5e:4x4", ("--config.mesh.fsdp=1", "--config.mesh.tensor=16"), "tensor is 16; it must divide the model's kv_heads .8."),
])
def test_configs_that_cannot_run_are_refused(topology, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        given(topology, *flags).estimate()


def test_every_mesh_of_sixteen_devices_once():
    found = list(search.meshes(16, 1, 1))
    assert all(mesh["data"] * mesh["fsdp"] * mesh["context"] * mesh["tensor"] == 16 for mesh in found)
    # Ways to write 2 ** 4 as an ordered product of four powers of 2: C(7, 3).
    assert len({tuple(mesh.values()) for mesh in found}) == len(found) == 35
    assert all(mesh["data"] % 2 == 0 for mesh in search.meshes(16, 1, 2))


def test_the_best_mesh_is_the_fastest_of_those_that_leave_5_percent_of_the_memory():
    found = search.possible(given("v5e:4x4"))
    assert found[0].fits
    once = [run.seconds + sum(task.seconds for task in run.tasks if task.task.calls is None) for run in found]
    fitting = [(run.peak > 0.95 * run.cluster.usable, seconds) for run, seconds in zip(found, once, strict=True) if run.fits]
    assert fitting == sorted(fitting) and len(found) > len(fitting) > 3


@pytest.mark.slow
def test_advice_names_changes_that_fit():
    advice = search.advice(given("v5e:4x4"))
    assert advice and all(run.fits for _, run in advice)
    assert advice[0][0].startswith("config.mesh: ")
    full = search.advice(given("v5e:4x4", "--config.lora.rank=0", "--config.lora.base=float32"))
    assert any("config.lora.rank=16" in words or "a larger cluster" in words for words, _ in full)


@pytest.mark.medium
def test_no_advice_for_a_run_that_can_never_fit():
    long = ("--config.model.max_length=131072", "--config.ppo.max_new_tokens=65536", "--config.ppo.micro_batch_tokens=0")
    assert search.advice(given("v5e:1x1", "--config.mesh.fsdp=1", *long, shape="Llama-3.1-70B")) == []


def test_cost_is_device_hours_times_the_price_in_the_file():
    run = given("v5e:4x4", "--config.mesh.generation=training").estimate()
    prices = read_prices("configs/prices_example.json")
    assert money(run, prices) == pytest.approx(run.seconds / 3600 * 16 * 1.0)
    assert to_json(run, {}, Assumptions(), prices)["money"]["date"] == "2026-01-01"


@pytest.mark.parametrize(("content", "sentence"), [
    ("[", "is not JSON"),
    ("[]", "contains a list; expected an object with date"),
    ('{"currency": "USD", "per_device_hour": {}}', "date is None; expected the date of the prices"),
    ('{"date": "May", "currency": "USD", "per_device_hour": {}}', "date is 'May'"),
    ('{"date": "2026-01-01", "currency": "USD", "per_device_hour": {"v9": 1}}', "a price for 'v9'; known chips: v4"),
    ('{"date": "2026-01-01", "currency": "USD", "per_device_hour": {"v4": "1"}}', "the price of v4 is '1'; expected a number"),
])
def test_invalid_prices_are_refused(tmp_path, content, sentence):
    file = tmp_path / "prices.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        read_prices(str(file))
    with pytest.raises(UserError, match="cannot be read"):
        read_prices(str(tmp_path / "none.json"))


def test_a_combination_of_changes_names_each_field_once():
    """Of several values of one field, only the last is shown."""
    ((words, run),) = search.advice(given("v5e:1x1", "--config.lora.rank=0", "--config.lora.base=float32"))
    fields = re.findall(r"(config\.[\w.]+)=", words)
    assert run.fits and len(fields) > 1 and len(fields) == len(set(fields))


def test_early_stopping_keeps_one_more_copy_of_the_preference_model():
    def resident(*flags):
        plan = given("v5e:4x4", *flags).estimate()
        return next(task for task in plan.tasks if task.task.name == "preference update").resident

    plain, stopping = resident(), resident("--config.preference.early_stopping=True")
    assert stopping == plain | {"best preference model": plain["preference model"]}
