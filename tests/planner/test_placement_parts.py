"""What a run adds to a placement of the search, or leaves out: values in the update, and the copy of the reference."""

from __future__ import annotations

import dataclasses

import pytest

from jaxalign.placement.slices import DeviceSlice
from jaxalign.planner.hardware import chips
from jaxalign.planner.placement_parts import in_parts
from jaxalign.planner.placement_schedules import FLAT
from jaxalign.planner.placement_search import SYNCHRONOUS, Devices, Found, Problem, assemble
from jaxalign.planner.placement_sets import place_set
from jaxalign.planner.role_models import ExecutionModel, RoleModel, Workload
from tests.planner.planned import model

CHIP = chips()["H100-80"]
ROLES = tuple(RoleModel(role, model(head="scalar" if role == "critic" else "lm"), "float32")
              for role in ("policy", "critic", "reference"))
ROWS = Workload(512, 256, 64)
ENGINE = ExecutionModel(axes=("tensor",))  # One mesh for each number of devices.


def found(*groups: tuple[str, ...], count: int, **workload) -> tuple[Found, Found, Problem]:
    """(a placement of the search, the same as a run executes it, the problem)."""
    rows = dataclasses.replace(ROWS, **workload)
    problem = Problem(ROLES, (Devices(CHIP, 8),), rows, ENGINE)
    sets = [(0, place_set(tuple(role for role in ROLES if role.role in group), CHIP, count, rows, ENGINE)) for group in groups]
    searched = assemble(problem, sets, FLAT if len(groups) == 1 else SYNCHRONOUS)
    return searched, in_parts(searched, 0, problem), problem


def seconds(one: Found, role: str, phase: str) -> float | None:
    return next((group.phases[phase][role] for group in one.sets if role in group.phases[phase]), None)


@pytest.mark.parametrize(("groups", "counted"), [
    ([("policy", "critic", "reference")], False),
    ([("policy", "reference"), ("critic",)], True),  # A critic on a mesh of its own cannot run in the policy's program.
])
def test_the_values_of_a_critic_take_no_pass_if_the_update_computes_them(groups, counted):
    searched, run, _ = found(*groups, count=8 // len(groups), values_in_update=True)
    assert seconds(searched, "critic", "scoring") > 0
    assert (seconds(run, "critic", "scoring") is not None) == counted
    _, usual, _ = found(*groups, count=8 // len(groups))
    spared = 0.0 if counted else seconds(usual, "critic", "scoring")
    assert usual.seconds - run.seconds == pytest.approx(spared)


def test_the_policy_s_devices_hold_a_copy_of_a_reference_on_another_mesh():
    _, apart, _ = found(("policy", "critic"), ("reference",), count=4)
    _, together, problem = found(("policy", "critic", "reference"), count=4)

    def temporary(one: Found) -> float:
        (variant,) = (member.variants["training"].temporary for group in one.sets for member in group.members
                      if member.role.role == "policy")
        return variant

    own = 8_030_261_248 * 4 / 4  # Parameters of Llama-3.1-8B in float32, over tensor=4.
    assert temporary(apart) - temporary(together) == pytest.approx(own, rel=1e-3)
    assert apart.slices == (DeviceSlice(0, 4), DeviceSlice(4, 4)) and problem.count == 8
