"""Strategies on machines of 8 devices: the devices and the mesh of each role."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxalign.parallel import mesh as parallel_mesh
from jaxalign.placement import meshes
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.resolve import resolve

ONE = Machine((Host("TPU v5e", 8),))
TWO = Machine((Host("TPU v5e", 4), Host("TPU v5e", 4)))
PPO = ("policy", "critic", "reference", "reward")


def table(placement) -> dict[str, str]:
    """The devices and the mesh of each role as text."""
    return {name: f"{placed.devices}:{meshes.text(placed.mesh)}" for name, placed in placement.roles.items()}


def test_flat_has_all_roles_on_all_devices_and_no_shadow():
    placement = resolve("flat", PPO, TWO, {"data": 2, "fsdp": 4})
    assert table(placement) == dict.fromkeys(PPO, "0-7:data=2,fsdp=4")
    assert placement.serving("generator") == placement.roles["policy"]
    assert placement.serving("value") == placement.roles["critic"]


def test_flat_uses_as_many_devices_as_the_mesh():
    assert table(resolve("flat", ("policy",), ONE, {})) == {"policy": "0:data=1"}


def test_flat_spans_all_processes():
    two = Machine(TWO.hosts, processes=2)
    assert table(resolve("flat", ("policy", "reward"), two, {"fsdp": 8})) == dict.fromkeys(("policy", "reward"), "0-7:fsdp=8")


def test_interleave_is_the_papers_example():
    """Shares 1, 1, 0.5, 0.5 on 8 ranks: 0-7, 0-7, 0-3, 4-7."""
    assert table(resolve("interleave", PPO, TWO, {"fsdp": 8})) == {
        "policy": "0-7:fsdp=8", "critic": "0-7:fsdp=8", "reference": "0-3:fsdp=4", "reward": "4-7:fsdp=4"}


@pytest.mark.parametrize(("roles", "parts"), [
    (("reference", "reward.a", "reward.b"), ["0-3", "4-5", "6-7"]),
    (("reference", "reward.a", "reward.b", "reward.c"), ["0-3", "4-5", "4-5", "6-7"]),  # 3 does not divide 4 devices.
    (("reward.a", "reward.b"), ["0-3", "4-7"]),
    (("reward.a", "reward.b", "reward.c", "judge"), ["0-1", "2-3", "4-5", "6-7"]),
    (("reward", "reference"), ["4-7", "0-3"]),
])
def test_interleave_divides_the_devices_between_the_scoring_roles(roles, parts):
    placement = resolve("interleave", ("policy", *roles), ONE, {"data": 8})
    assert [str(placement.roles[name].devices) for name in roles] == parts


def test_interleave_keeps_to_hosts():
    """Thirds of 12 devices are hosts of 4. In hosts of 3 they would split hosts, so two reward models share a half."""
    roles, slices = ("policy", "reward.a", "reward.b", "reward.c"), []
    for machine in (Machine((Host("A100", 4),) * 3), Machine((Host("A100", 3),) * 4)):
        placed = resolve("interleave", roles, machine, {"fsdp": 12}).roles
        slices.append([str(placed[name].devices) for name in roles])
    assert slices == [["0-11", "0-3", "4-7", "8-11"], ["0-11", "0-5", "0-5", "6-11"]]


def test_a_part_keeps_the_axes_that_split_the_model():
    placed = resolve("interleave", PPO, ONE, {"data": 2, "fsdp": 2, "tensor": 2}).roles
    assert meshes.text(placed["reference"].mesh) == "fsdp=2,tensor=2"


def test_a_part_has_a_mesh_that_divides_the_heads_and_rows_of_its_model():
    limits = {"reward": Limits(heads=3, kv_heads=3, rows=4)}
    placed = resolve("interleave", PPO, ONE, {"fsdp": 4, "tensor": 2}, limits=limits).roles
    assert meshes.text(placed["reference"].mesh) == "fsdp=2,tensor=2" and meshes.text(placed["reward"].mesh) == "fsdp=4"


def test_separate_puts_inference_on_the_second_half_without_fsdp():
    placement = resolve("separate", PPO, TWO, {"fsdp": 2, "tensor": 2})
    inference = dict.fromkeys(("generator", "value", "reference", "reward"), "4-7:data=2,tensor=2")
    assert table(placement) == {"policy": "0-3:fsdp=2,tensor=2", "critic": "0-3:fsdp=2,tensor=2"} | inference


def test_separate_without_a_critic_has_no_value_role():
    assert table(resolve("separate", ("policy", "reward"), ONE, {"fsdp": 6}, generation_devices=2)) == {
        "policy": "0-5:fsdp=6", "generator": "6-7:data=2", "reward": "6-7:data=2"}


def test_tensor_stays_within_a_host_on_the_inference_side():
    machine = Machine((Host("TPU v5p", 8), Host("TPU v5e", 4), Host("TPU v5e", 4)))
    placed = resolve("separate", ("policy",), machine, {"tensor": 8}).roles
    assert meshes.text(placed["policy"].mesh) == "tensor=8" and meshes.text(placed["generator"].mesh) == "data=2,tensor=4"


def test_half_of_the_devices_is_rounded_to_whole_hosts_of_one_kind():
    machine = Machine((Host("TPU v5p", 4), Host("TPU v5e", 4), Host("TPU v5e", 4)))
    placed = resolve("separate", ("policy",), machine, {"fsdp": 4}).roles
    assert [str(placed[name].devices) for name in ("policy", "generator")] == ["0-3", "4-11"]


def test_custom_entries():
    entries = ("policy+critic=0-3:fsdp=4", "generator=4-7:tensor=4", "reward=4-5", "reference = 6 - 7")
    placement = resolve("custom", PPO, ONE, {}, custom=entries)
    assert table(placement) == {"policy": "0-3:fsdp=4", "critic": "0-3:fsdp=4", "generator": "4-7:tensor=4",
                                "reward": "4-5:data=2", "reference": "6-7:data=2"}
    assert {str(devices): roles for devices, roles in placement.groups.items()} == {
        "0-3": ("policy", "critic"), "4-7": ("generator",), "4-5": ("reward",), "6-7": ("reference",)}


def test_the_devices_of_a_role_may_contain_those_of_roles_of_other_phases():
    entries = ("policy=0-3", "generator=0-7", "reward=4-7")
    assert len(resolve("custom", ("policy", "reward"), TWO, {}, custom=entries).groups) == 3


def test_without_a_mesh_trained_roles_are_on_fsdp_and_others_on_data():
    placement = resolve("custom", ("policy", "reference"), ONE, {}, custom=("policy+reference=0-7",))
    assert table(placement) == {"policy": "0-7:fsdp=8", "reference": "0-7:data=8"}


def test_the_mapping_of_hybridflow_for_96_devices_is_possible():
    """arXiv 2409.19256 finds {actor, reference} | {critic, reward} for the 13B model on 96 GPUs."""
    machine = Machine((Host("A100", 8),) * 12)
    placement = resolve("custom", PPO, machine, {}, custom=("policy+reference=0-47", "critic+reward=48-95"))
    assert [len(roles) for roles in placement.groups.values()] == [2, 2]


def test_a_placement_is_json_and_lines():
    placement = resolve("separate", ("policy", "reward"), ONE, {"fsdp": 4})
    assert json.loads(json.dumps(placement.to_dict())) == {"strategy": "separate", "roles": {
        "policy": {"devices": "0-3", "mesh": {"fsdp": 4}}, "generator": {"devices": "4-7", "mesh": {"data": 4}},
        "reward": {"devices": "4-7", "mesh": {"data": 4}}}}
    assert placement.describe() == ["devices 0-3  fsdp=4  policy (trained)",
                                    "devices 4-7  data=4  generator (weights of the policy), reward"]


def test_the_axes_are_those_of_the_meshes_of_a_run():
    assert meshes.AXES == parallel_mesh.AXES


@pytest.mark.process
def test_placement_imports_no_jax():
    code = "import sys, jaxalign.placement.resolve; assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
