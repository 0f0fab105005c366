"""Placements that are refused: the sentence names the mistake and the nearest placement that works."""

from __future__ import annotations

import pytest

from jaxalign.errors import UserError
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.resolve import resolve

ONE = Machine((Host("TPU v5e", 8),))
TWO = Machine((Host("TPU v5e", 4), Host("TPU v5e", 4)))
SMALL = Machine((Host("TPU v5e", 1),))
MIXED = Machine((Host("TPU v5p", 4), Host("TPU v5e", 4)))
WORLD = Machine(TWO.hosts, processes=2)
PPO = ("policy", "critic", "reference", "reward")
ACTOR_CRITIC, POLICY = ("policy", "critic"), ("policy",)
TENSOR, BATCH = {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 4}
ODD = {"reward": Limits(heads=3, kv_heads=3, rows=3)}


def refused(*given, **options) -> str:
    with pytest.raises(UserError) as error:
        resolve(*given, **options)
    return str(error.value)


@pytest.mark.parametrize(("strategy", "roles", "mesh", "message"), [
    ("interlaeve", POLICY, {}, "'interlaeve' is not a placement strategy; did you mean interleave?"),
    ("flat", ("policy", "crittic"), {}, "'crittic' is not a role; did you mean critic?"),
    ("flat", ("policy", "reward", "reward"), {},
     "the roles name reward twice; name each once, and several reward models as reward.NAME"),
    ("flat", ("reward",), {}, "the roles have no policy; add policy, which every placement needs"),
    ("flat", ("policy", "generator"), {},
     "generator is not a role of its own but a copy of the policy, which a strategy adds; leave it out of the roles"),
    ("flat", POLICY, {"fdsp": 8}, "'fdsp' is not a mesh axis; did you mean fsdp?"),
    ("flat", POLICY, {"fsdp": 0}, "mesh axis fsdp has size 0; it must be a whole number of at least 1"),
])
def test_names_of_strategies_roles_and_axes(strategy, roles, mesh, message):
    assert refused(strategy, roles, ONE, mesh) == message


@pytest.mark.parametrize(("machine", "fsdp", "message"), [
    (ONE, 16, "needs devices 0-15, which do not all exist, as the machine has 8; fsdp=8 on devices 0-7 would work"),
    (TWO, 6, "needs devices 0-5, which split host 1, which has devices 4-7; fsdp=4 on devices 0-3 would work"),
    (MIXED, 8, "needs devices 0-7, which are of unlike kinds (TPU v5p, TPU v5e); fsdp=4 on devices 0-3 would work"),
    (WORLD, 4, "needs devices 0-3, which leave processes without devices: the 2 processes have 8; data=2,fsdp=4 on devices 0-7 "
               "would work"),
    (Machine(MIXED.hosts, processes=2), 8,
     "needs devices 0-7, which are of unlike kinds (TPU v5p, TPU v5e); no mesh of all hosts works, so run on fewer hosts of "
     "one kind"),
])
def test_meshes_of_flat(machine, fsdp, message):
    assert refused("flat", POLICY, machine, {"fsdp": fsdp}) == f"the mesh fsdp={fsdp} {message}"


@pytest.mark.parametrize(("roles", "machine", "fsdp", "message"), [
    (("policy", "critic", "reward"), ONE, 8,
     "needs two roles that only score, to run at the same time, but the run has reward; use flat"),
    (POLICY, ONE, 8, "needs two roles that only score, to run at the same time, but the run has none; use flat"),
    (PPO, ONE, 1,
     "cannot divide 1 device into parts of whole hosts for reference and reward; use the mesh data=2 or flat"),
    (PPO, ONE, 5,
     "cannot divide 5 devices into parts of whole hosts for reference and reward; use the mesh fsdp=4 or flat"),
    (PPO, Machine((Host("A100", 4),) * 3), 12,
     "cannot divide 12 devices into parts of whole hosts for reference and reward; use the mesh fsdp=8 or flat"),
    (PPO, SMALL, 1, "cannot divide 1 device into parts of whole hosts for reference and reward; use flat"),
    (PPO, WORLD, 8, "needs one process, but this run has 2, in which every role must span all hosts; use flat"),
])
def test_interleave(roles, machine, fsdp, message):
    assert refused("interleave", roles, machine, {"fsdp": fsdp}) == f"placement interleave {message}"


@pytest.mark.parametrize(("machine", "fsdp", "message"), [
    (WORLD, 4, "placement separate needs one process, but this run has 2, in which every role must span all hosts; use flat"),
    (SMALL, 1, "placement separate cannot divide the 1 device of this machine into two sides, each of one kind and of whole "
               "hosts; use flat"),
    (ONE, 8, "the mesh fsdp=8 has 8 devices, but policy has 4 (0-3); fsdp=4 would work"),
])
def test_separate(machine, fsdp, message):
    assert refused("separate", POLICY, machine, {"fsdp": fsdp}) == message


@pytest.mark.parametrize(("mesh", "limits", "message"), [
    (TENSOR, {"policy": Limits(heads=12, kv_heads=2)},
     "the mesh data=2,tensor=4 cannot split 2 key/value heads evenly over tensor=4 for policy; data=4,tensor=2 would work"),
    (TENSOR, {"reward": Limits(heads=6)},
     "the mesh data=2,tensor=4 cannot split 6 heads evenly over tensor=4 for reward; data=4,tensor=2 would work"),
    (BATCH, {"policy": Limits(heads=8, kv_heads=8, rows=12)},
     "the mesh data=2,fsdp=4 cannot split a batch of 12 rows evenly over data x fsdp = 8 for policy; fsdp=4,tensor=2 would "
     "work"),
    (BATCH, {"policy": Limits(1, 1, 9), "reward": Limits(1, 1, 6)},
     "the mesh data=2,fsdp=4 cannot split a batch of 9 rows evenly over data x fsdp = 8 for policy; fsdp=3 on devices 0-2 "
     "would work"),
])
def test_a_mesh_that_does_not_divide_a_model_or_its_batch(mesh, limits, message):
    assert refused("flat", PPO, ONE, mesh, limits=limits) == message


@pytest.mark.parametrize(("strategy", "mesh", "message"), [
    ("interleave", {"fsdp": 8}, "fsdp=3 on devices 4-6 would work"),
    ("separate", {"fsdp": 4}, "data=3 on devices 4-6 would work")])
def test_no_mesh_of_a_part_divides_a_model_and_its_batch(strategy, mesh, message):
    message = f"no mesh of devices 4-7 divides the heads and the batch of reward; with placement custom, {message}"
    assert refused(strategy, PPO, ONE, mesh, limits=ODD) == message


@pytest.mark.parametrize(("machine", "devices", "message"), [
    (TWO, 8, "is 8 of 8 devices, which leaves none for training; 4 would work with a config.mesh of 4 devices"),
    (ONE, 8, "is 8 of 8 devices, which leaves none for training; 7 would work with a config.mesh of 1 device"),
    (ONE, -1, "is -1 of 8 devices, which leaves none for generation; 1 would work with a config.mesh of 7 devices"),
    (TWO, 3, "is 3, so that devices 0-4 for training split host 1, which has devices 4-7; 4 would work with a config.mesh of 4 "
             "devices"),
    (MIXED, 2, "is 2, so that devices 0-5 for training are of unlike kinds (TPU v5p, TPU v5e); 4 would work with a config.mesh "
               "of 4 devices"),
])
def test_numbers_of_generation_devices(machine, devices, message):
    error = refused("separate", POLICY, machine, {"fsdp": 4}, generation_devices=devices)
    assert error == f"config.placement.generation_devices {message}"


@pytest.mark.parametrize(("machine", "devices", "rows", "message"), [
    (ONE, 3, 8, "has 4 devices, but policy and critic have 5 (0-4); config.placement.generation_devices=4 would work"),
    (ONE, 4, 6, "cannot split a batch of 6 rows evenly over data x fsdp = 4 for policy; "
                "fsdp=3 with config.placement.generation_devices=5 would work"),
    (Machine((Host("TPU v5e", 2),) * 4), 2, 8,
     "has 4 devices, but policy and critic have 6 (0-5); config.placement.generation_devices=4 would work"),
])
def test_the_mesh_of_training_with_a_number_of_generation_devices(machine, devices, rows, message):
    limits = {role: Limits(3, 3, rows) for role in ("policy", "critic")}
    error = refused("separate", ACTOR_CRITIC, machine, {"fsdp": 4}, generation_devices=devices, limits=limits)
    assert error == f"the mesh fsdp=4 {message}"


def test_options_of_another_strategy():
    assert refused("flat", POLICY, ONE, {}, generation_devices=4) == (
        "config.placement.generation_devices is 4, but placement flat has no devices for generation only; set it to 0, or use "
        "separate")
    assert refused("flat", POLICY, ONE, {}, custom=("policy=0",)) == (
        "placement flat cannot have entries; leave them out, or use custom")
    assert refused("custom", POLICY, ONE, {}) == "placement custom has no entries; add some, such as policy+critic=0-3:fsdp=4"


FORM = "must be distinct axes with their sizes, as in policy+critic=0-3:fsdp=4"


@pytest.mark.parametrize(("roles", "machine", "entries", "message"), [
    # The form of entries.
    (POLICY, ONE, "policy", "placement entry 'policy' must have roles, devices and optionally a mesh, as in "
                            "policy+critic=0-3:fsdp=4"),
    (POLICY, ONE, "policy=3-0", "placement entry 'policy=3-0' has no device, as 0 is before 3; 0-3 would work"),
    (POLICY, ONE, "policy=0-7:fsdp", f"the mesh of placement entry 'policy=0-7:fsdp' {FORM}"),
    (POLICY, ONE, "policy=0-7:fsdp=2,fsdp=4", f"the mesh of placement entry 'policy=0-7:fsdp=2,fsdp=4' {FORM}"),
    (POLICY, ONE, "policy=0-7:fspd=8", "'fspd' is not a mesh axis; did you mean fsdp?"),
    (POLICY, ONE, "polcy=0-7", "'polcy' is not a role; did you mean policy?"),
    (POLICY, ONE, "policy=0-7 policy=0-3", "policy has two entries, with devices 0-7 first; leave one of them out"),
    (POLICY, ONE, "policy=0-7 critic=0-7",
     "an entry places critic, which this run does not have; its roles are policy, and generator may be added"),
    # Roles without devices.
    (PPO, ONE, "policy+critic=0-7 reference=0-3", "reward has no devices; add the entry reward=0-3"),
    (PPO, ONE, "reference=0-3", "policy has no devices; add the entry policy=0-3"),
    # Slices and meshes.
    (POLICY, ONE, "policy=0-9", "devices 0-9 of policy do not all exist, as the machine has 8; devices 0-7 would work"),
    (POLICY, TWO, "policy=2-5", "devices 2-5 of policy split host 0, which has devices 0-3; devices 2-3 would work"),
    (POLICY, TWO, "policy=0-4", "devices 0-4 of policy split host 1, which has devices 4-7; devices 0-3 would work"),
    (POLICY, MIXED, "policy=0-7", "devices 0-7 of policy are of unlike kinds (TPU v5p, TPU v5e); devices 0-3 would work"),
    (POLICY, ONE, "policy=0-7:fsdp=4", "the mesh fsdp=4 has 4 devices, but policy has 8 (0-7); data=2,fsdp=4 would work"),
    (POLICY, ONE, "policy=0-3 generator=4-7:fsdp=4",
     "the mesh fsdp=4 uses fsdp for generator, which decodes over data and tensor only; data=4 would work"),
    # Overlaps.
    (PPO, ONE, "policy+critic=0-4 reference+reward=3-7",
     "devices 0-4 of policy and 3-7 of reference overlap in part; reference=5-7 would work"),
    (PPO, ONE, "policy+critic=0-7 reference=0-7 reward=0-3",
     "devices 0-7 of reference and 0-3 of reward, which may run at the same time, are nested; reference=4-7 would work"),
    (ACTOR_CRITIC, ONE, "policy=0-7 critic=0-3",
     "devices 0-7 of policy and 0-3 of critic, which may run at the same time, are nested; policy=4-7 would work"),
    (ACTOR_CRITIC, Machine((Host("A100", 2),) * 3), "policy=0-3 critic=2-5",
     "devices 0-3 of policy and 2-5 of critic overlap in part; critic=4-5 would work"),
    (("policy", "reward.a", "reward.b"), TWO, "policy=0-7 reward.a=0-7 reward.b=1-2",
     "devices 0-7 of reward.a and 1-2 of reward.b, which may run at the same time, are nested; reward.a=4-7 would work"),
])
def test_custom_entries(roles, machine, entries, message):
    assert refused("custom", roles, machine, {}, custom=entries.split()) == message


def test_a_custom_mesh_that_does_not_divide_a_model():
    message = refused("custom", ("policy", "reward"), ONE, {}, custom=("policy=0-3", "reward=4-7"),
                      limits={"reward": Limits(heads=4, kv_heads=2, rows=6)})
    assert message == ("the mesh data=4 cannot split a batch of 6 rows evenly over data x fsdp = 4 for reward; data=2,tensor=2 "
                       "would work")


def test_custom_needs_one_process():
    assert refused("custom", POLICY, WORLD, {}, custom=("policy=0-7",)) == (
        "placement custom needs one process, but this run has 2, in which every role must span all hosts; use flat")
