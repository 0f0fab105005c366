"""The plan of a config with a placement: memory by group of devices, and what runs where."""

from __future__ import annotations

import functools
import json

import jax
import pytest

from jaxalign.errors import UserError
from jaxalign.parallel.sharding import make_sharding
from jaxalign.plan import main, read_config
from jaxalign.planner.compiled_placed import stage_targets
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import gpu_cluster, tpu_cluster
from jaxalign.planner.placed_estimate import STEP_ZERO, estimate_placed, estimate_stage
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from jaxalign.planner.topology import parse_topologies, parse_topology, require_placement

LLAMA = ("--config=configs/real_size.py:llama31_8b_h100x8", "--config.model.path=unread", "--config.data.train=unread",
         "--config.stages=ppo", "--config.reward.source=callable", "--config.reward.callable=mine.py:score")
PARAMETERS = 8_030_261_248  # Of Llama-3.1-8B, as published.
TOGETHER = "policy+critic+reference=0-7:fsdp=8"


def custom(*entries: str) -> tuple[str, str]:
    listed = ", ".join(f'"{entry}"' for entry in entries)
    return "--config.placement.strategy=custom", f"--config.placement.roles=({listed},)"


@functools.cache
def given(*arguments: str, gpus="H100x8", shape="Llama-3.1-8B", topologies=()) -> Given:
    config = read_config(["plan", *arguments], shape)
    policy = policy_model(config, abstract_sharding(config.mesh), shape or None)
    cluster, *others = [tpu_cluster(parse_topology(text)) for text in topologies] or [gpu_cluster(gpus)]
    return Given(config, policy, cluster, prompt=512 if shape else None, others=tuple(others))


def tasks(stage) -> dict:
    return {(role, each.task.phase): each for role, _, each in stage.tasks}


def test_a_placed_reward_model_is_no_part_of_the_other_scoring_programs():
    """It runs in a program of its own."""
    placed = ("--config.mesh.fsdp=4", "--config.placement.strategy=separate", "--config.stages=preference,ppo")
    stage = estimate_stage(given(*LLAMA[:3], *placed, topologies=("v5p:2x2x1", "v5p:2x2x1")), "ppo")
    scored = [each.task for _, _, each in stage.tasks if each.task.phase == "score"]
    assert scored and all(task.fused == () for task in scored)


def test_memory_of_each_group_by_hand():
    stage = estimate_stage(given(*LLAMA, "--config.mesh.fsdp=4", "--config.placement.strategy=separate"), "ppo")
    training, inference = stage.groups
    assert [str(group.devices) for group in stage.groups] == ["0-3", "4-7"]
    # float32 weights and two moments over four devices; copies of all weights on each device of the other side. Norms are on
    # every device.
    assert training.resident["policy"] == pytest.approx(PARAMETERS * 4 / 4, rel=1e-3)
    assert training.resident["policy's optimizer"] == pytest.approx(PARAMETERS * 8 / 4, rel=1e-3)
    assert inference.resident["generator"] == inference.resident["reference"] == pytest.approx(PARAMETERS * 4)
    assert set(inference.resident) == {"generator", "value", "reference"} and not inference.fits
    assert inference.peak == pytest.approx(sum(inference.resident.values()) + inference.temporary["generate (policy)"])
    assert stage.one_program and stage.iterations == 200
    # The policy's four devices together send one float32 copy, at 80% of 450 GB/s each; every target receives all of it.
    assert stage.moves["generator"] == pytest.approx(PARAMETERS * 4 / (0.8 * 450e9))


def test_all_roles_on_one_mesh_are_planned_as_flat():
    """The programs of scoring differ: flat scores with all roles in one."""
    flat = given(*LLAMA).estimate()
    placed = estimate_placed(given(*LLAMA, *custom(TOGETHER)))
    (stage,), (group,) = placed.placed, placed.placed[0].groups
    by_phase = {each.task.phase: each for each in flat.tasks}
    for key, phase in ((("policy", "generate"), "generate"), (("policy", "update"), "update")):
        assert tasks(stage)[key].seconds == by_phase[phase].seconds
        assert tasks(stage)[key].temporary == by_phase[phase].temporary
    assert group.temporary[STEP_ZERO] == sum(by_phase["checks"].temporary.values())
    assert sum(group.resident.values()) == pytest.approx(sum(by_phase["update"].resident.values()))
    assert placed.seconds == pytest.approx(flat.seconds, rel=0.05) and not placed.tasks


def test_the_checks_of_step_0_copy_the_reference_to_another_mesh():
    same = estimate_stage(given(*LLAMA, *custom(TOGETHER)), "ppo").groups[0]
    other = estimate_stage(given(*LLAMA, *custom("policy+critic=0-7:fsdp=8", "reference=0-7:fsdp=4,tensor=2")), "ppo").groups[0]
    off = given(*LLAMA, *custom(TOGETHER), "--config.ppo.checks.step_zero=False")
    assert STEP_ZERO not in estimate_stage(off, "ppo").groups[0].temporary
    assert other.temporary[STEP_ZERO] - same.temporary[STEP_ZERO] == pytest.approx(PARAMETERS * 4 / 8, rel=1e-3)


@pytest.mark.parametrize(("entries", "passes"), [
    ((TOGETHER,), set()),
    (("policy+reference=0-3:fsdp=4", "critic=4-7:fsdp=4"), {("critic", "score")}),
])
def test_one_update_per_rollout_computes_the_values_unless_the_critic_is_apart(entries, passes):
    once = ("--config.ppo.epochs=1", "--config.ppo.minibatches=1")
    stage = estimate_stage(given(*LLAMA, *once, *custom(*entries)), "ppo")
    assert {key for key in tasks(stage) if key[0] in ("critic", "value") and key[1] == "score"} == passes


def test_groups_of_unlike_kinds():
    own = given(*LLAMA, *custom("policy+critic=0-3:fsdp=4", "reference+generator=4-11:tensor=8"),
                topologies=("v5p:2x2x1", "v5e:2x4"))
    stage = estimate_stage(own, "ppo")
    assert [group.cluster.name for group in stage.groups] == ["v5p:2x2x1", "v5e:2x4"] and not stage.one_program
    usable = [group.cluster.usable / 2**30 for group in stage.groups]
    assert usable == pytest.approx([95.73, 15.75])  # As docs/compiled.md states.


TINY = ("--config=configs/ppo.py", "--config.stages=ppo", "--config.reward.source=callable", "--config.reward.callable=m.py:s")


def test_the_plan_prints_the_groups_and_the_tasks(capsys):
    roles = custom("policy+critic=0-1:fsdp=2", "reference+generator=2-3:data=2")
    assert main(["plan", *TINY, "--gpus=L4x4", *roles]) == 0
    printed = capsys.readouterr().out
    assert "Stage ppo with placement custom: memory, GB on each device" in printed
    assert "generate (policy)" in printed and "The generator receives its weights in" in printed and "It fits: " in printed
    assert "several worlds" not in printed
    assert main(["plan", *TINY, "--gpus=L4x4", *roles, "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["placed"]
    assert [group["devices"] for group in stage["groups"]] == ["0-1", "2-3"] and stage["one_program"] and stage["fits"]
    assert {task["role"] for task in stage["tasks"]} == {"generator", "reference", "critic", "policy"}
    for group in stage["groups"]:
        assert group["peak_bytes"] == sum(group["resident_bytes"].values()) + max(group["temporary_bytes"].values())


APART = "--topology=policy+critic=v5p:2x2x1,reference=v5e:2x4"


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((APART,), "with --config.placement.roles=policy+critic=0-3,reference=4-11"),
    ((APART, *custom("policy+critic=0-3:fsdp=4", "reference=0-3")),
     "puts reference on v5e:2x4, devices 4-11, but config.placement puts it on devices 0-3"),
    (("--topology=policy=v5p:2x2x1,judge=v5e:2x4", *custom("policy+critic=0-3:fsdp=4", "reference=4-11")), "names judge,"),
    (("--topology=policy=v5p:2x2x1,v5e:2x4",), "'v5e:2x4'; expected roles and their topology"),
    (("--topology=policy=v5p:2x2x1,policy=v5e:2x4",), "names policy twice"),
    (("--gpus=L4x4,H100x4",), "several machines are given, but config.placement.strategy is flat; add --search"),
    (("--gpus=L4x4", "--search", *custom("policy+critic+reference=0-3:fsdp=4")), "--search compares placements itself"),
    (("--gpus=L4x4", *custom("policy+critic=0-3:fsdp=4", "reference=2-5")), "do not all exist"),
])
def test_what_a_plan_with_placements_refuses(capsys, arguments, sentence):
    assert main(["plan", *TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.strip().splitlines()) == 1


def test_topologies_by_role_and_without():
    (first, a), (second, b) = parse_topologies("policy+critic=v5p:2x2x4,generator+reference+reward=v5e:2x4")
    assert (first, a.name, second, b.chips) == (("policy", "critic"), "v5p:2x2x4", ("generator", "reference", "reward"), 8)
    assert [(roles, topology.name) for roles, topology in parse_topologies("v5p:2x2x1,v5e:2x4")] == [
        ((), "v5p:2x2x1"), ((), "v5e:2x4")]
    ((roles, topology),) = parse_topologies("v5e:2x4", slices=2)
    assert roles == () and topology.chips == 16
    require_placement(parse_topologies("v5e:2x4"), "flat")
    with pytest.raises(UserError, match="config.mesh.slices is 2"):
        parse_topologies("v5p:2x2x1,v5e:2x4", slices=2)


@pytest.mark.mesh
def test_each_role_has_programs_on_its_own_devices_and_the_arrays_there():
    own = given(*TINY, *custom("policy=0-1:fsdp=2", "critic=2-3:fsdp=2", "reference=4-5", "generator+value=6-7"), gpus="L4x8",
                shape="")
    like = make_sharding(own.config.mesh, jax.devices()[:1])
    planned = stage_targets(own, "ppo", like, jax.devices())
    found = {(program.phase, program.role): (program, where) for program, _, _, where in planned}
    expected = {("sampling", "generator"): "6-7", ("scoring", "reference"): "4-5", ("scoring", "value"): "6-7",
                ("checks", "policy, reference"): "0-1", ("update", "policy"): "0-1", ("update", "critic"): "2-3"}
    for key, devices in expected.items():
        program, where = found[key]
        first, last = map(int, devices.split("-"))
        arrays = [x for x in jax.tree.leaves(program.arguments) if isinstance(x, jax.ShapeDtypeStruct)]
        assert {device.id for x in arrays for device in x.sharding.device_set} == {first, last}
        assert where == f"{devices} of L4x8"
    assert {"generator", "value"} == set(found["scoring", "value"][0].held)
    assert set(found["update", "critic"][0].held) == {"critic", "critic optimizer"}
    assert "copy of the reference" in found["checks", "policy, reference"][0].held
    # Arrays that are arguments are the same objects, so that the report does not count them twice.
    program = found["scoring", "reference"][0]
    arguments = {id(x) for x in jax.tree.leaves(program.arguments)}
    assert all(id(x) in arguments for x in jax.tree.leaves(program.held["reference"]))


def test_auto_is_planned_as_its_choice(capsys):
    auto = ("--config=configs/grpo.py", *TINY[1:], "--config.placement.strategy=auto")
    assert main(["plan", *auto, "--gpus=L4x2"]) == 0
    printed = capsys.readouterr().out
    assert "config.placement.strategy=auto would choose flat with" in printed
    # A choice other than config.mesh is planned as a placement.
    assert "Stage ppo with placement custom" in printed and "devices 0-1" in printed
