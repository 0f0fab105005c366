"""Compiles the programs of a run with a placement: those of each role for the devices that it is on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

import jax

from jaxalign.parallel.role_meshes import role_shardings
from jaxalign.parallel.sharding import Sharding, make_sharding
from jaxalign.planner.compiled import CompiledProgram, CompileTarget, compile_targets, run_programs
from jaxalign.planner.gpu_topology import GpuTopology
from jaxalign.planner.placed_estimate import StageOnDevices
from jaxalign.planner.placed_programs import PLACED_PROGRAMS, PlacedRoles
from jaxalign.planner.placed_runs import PLACED_STAGES
from jaxalign.planner.programs import Run
from jaxalign.planner.search import Given
from jaxalign.planner.topology import Topology, topology_devices


def compile_for(
    given: Given, topologies: Sequence[Topology | GpuTopology], programs: Sequence[str] = (),
    progress: Callable[[CompiledProgram], None] | None = None, reports: pathlib.Path | None = None,
) -> list[CompiledProgram]:
    """Compiles every jitted step of a run.

    Stages with a placement compile each role's programs for the devices that the role is on; all other stages compile for
    config.mesh on the first topology.

    Args:
      given: the inputs of the plan.
      topologies: the devices, numbered one topology after another.
      programs, progress, reports: as in `compile_run`.

    Raises:
      UserError: the placement is not possible.
    """
    config, mesh = given.config, given.config.mesh
    count = mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.pipeline
    placed = [] if config.placement.strategy == "flat" else [stage for stage in PLACED_STAGES if stage in config.stages]
    policy = given.policy.on(make_sharding(mesh, topology_devices(topologies[0], count)))
    usable, described = topologies[0].usable, _described(topologies[:1])
    targets = [CompileTarget(program, usable, described) for program in run_programs(config, policy, given.prompt)
               if program.stage not in placed]
    if placed:
        devices = [device for topology in topologies for device in topology_devices(topology)]
        for stage in placed:
            targets += stage_targets(given, stage, policy.sharding, devices, _described(topologies))
    chosen = [target for target in targets if not programs or any(wanted in target.program.name for wanted in programs)]
    return compile_targets(chosen, progress, reports)


def stage_targets(
    given: Given, stage: str, like: Sharding, devices: Sequence[jax.Device], described: str = ""
) -> list[CompileTarget]:
    """The programs of a stage with a placement.

    Args:
      given: the inputs of the plan.
      stage: the stage.
      like: the sharding of config.mesh.
      devices: all devices, in the order of their numbers.
      described: a description of them, for kept reports.
    """
    on, targets = StageOnDevices(given, stage), []
    shardings = role_shardings(on.placement, like, devices)
    roles = PlacedRoles(shardings, {role: place.devices for role, place in on.placement.roles.items()})
    for role, program in PLACED_PROGRAMS[stage](Run(given.config, given.policy.on(shardings["policy"]), given.prompt), roles):
        place = on.placement.roles[role].devices
        owner = on.owner(place)
        targets.append(CompileTarget(program, int(owner.usable), f"{described} {place}", f"{place} of {owner.name}"))
    return targets


def _described(topologies: Sequence[Topology | GpuTopology]) -> str:
    return json.dumps([dataclasses.asdict(topology) for topology in topologies])
