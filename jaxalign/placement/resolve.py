"""Resolves a placement strategy to the devices and the mesh of each role.

Source: "Adaptive Placement and Parallelism for RLHF" (arXiv 2312.11819). flat is its flattening, interleave its interleaving,
separate its separation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.checks import (
    check_mesh,
    check_roles,
    check_world,
    host_part,
    limits_of,
    mesh_problem,
    possible,
    remedy,
    slice_problem,
)
from jaxalign.placement.custom import place
from jaxalign.placement.machine import Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.names import require_known
from jaxalign.placement.plan import Placement, RolePlacement
from jaxalign.placement.roles import SHADOWS, role_of
from jaxalign.placement.slices import DeviceSlice, allocate

STRATEGIES = ("flat", "interleave", "separate", "custom")
AUTO = "auto"
"""The strategy of a config that chooses flat or custom when a stage starts; `resolve` does not accept it."""


def resolve(
    strategy: str, roles: Sequence[str], machine: Machine, mesh: Mapping[str, int], *, generation_devices: int = 0,
    custom: Sequence[str] = (), limits: Mapping[str, Limits] | None = None,
) -> Placement:
    """The devices and the mesh of each role of a run.

    flat: all roles on the devices of the run's mesh, which are the first of the machine. The policy samples and the critic
    computes values.

    interleave: as flat for the policy and the critic. The roles that only score are on exclusive parts, so that they run at the
    same time: the reference on the first half, and the reward models and the judge on equal parts of the second half; without a
    reference, on equal parts of all. If there are more of them than parts of whole hosts, neighbours share a part.

    separate: the policy and the critic on the first devices with the run's mesh; on the remaining ones a generator, a value
    role if there is a critic, and the roles that only score, as these too only run inference. They take turns there, with
    meshes of data and tensor only: tensor is the run's, as far as it stays within a host.

    custom: entries of roles, devices and optionally a mesh, such as "policy+critic=0-3:fsdp=4"; see `custom.place`.

    Args:
      strategy: one of `STRATEGIES`.
      roles: the roles of the run without shadows, such as ("policy", "critic", "reference", "reward").
      machine: the devices.
      mesh: the sizes of axes of the run's mesh; those not given are 1. custom does not use it.
      generation_devices: for separate, the number of devices for inference; 0: half, or the nearest number that leaves whole
        hosts to both sides.
      custom: the entries of custom.
      limits: the sizes that meshes must divide, by role; "reward" is for all reward models without their own.

    Raises:
      UserError: the placement is not possible; the message names the nearest one that is.
    """
    limits = limits or {}
    require_known("placement strategy", strategy, STRATEGIES)
    check_roles(roles)
    mesh = meshes.complete(mesh)
    if generation_devices and strategy != "separate":
        raise UserError(f"config.placement.generation_devices is {generation_devices}, but placement {strategy} has no devices "
                        "for generation only; set it to 0, or use separate")
    if bool(custom) != (strategy == "custom"):
        raise UserError("placement custom has no entries; add some, such as policy+critic=0-3:fsdp=4" if not custom else
                        f"placement {strategy} cannot have entries; leave them out, or use custom")
    check_world(strategy, machine.processes)
    placed: dict[str, RolePlacement]
    if strategy == "custom":
        placed = place(custom, roles, machine, limits)
    elif strategy == "separate":
        placed = _separate(roles, machine, mesh, generation_devices, limits)
    else:
        placed = (_flat if strategy == "flat" else _interleave)(roles, machine, mesh, limits)
    return Placement(strategy, placed)


def _on(roles: Sequence[str], devices: DeviceSlice, mesh: Mapping[str, int]) -> dict[str, RolePlacement]:
    return {name: RolePlacement(name, devices, mesh) for name in roles}


def _by_role(roles: Sequence[str], limits: Mapping[str, Limits]) -> dict[str, Limits]:
    return {name: limits_of(limits, name) for name in roles}


def _flat(
    roles: Sequence[str], machine: Machine, mesh: Mapping[str, int], limits: Mapping[str, Limits]
) -> dict[str, RolePlacement]:
    """All roles on the first devices, as many as the mesh has."""
    devices, own = DeviceSlice(0, meshes.size(mesh)), _by_role(roles, limits)
    problem = slice_problem(devices, machine)
    if not problem and machine.processes > 1 and devices != machine.devices:
        problem = f"leave processes without devices: the {machine.processes} processes have {machine.count}"
    if problem:
        raise UserError(f"the mesh {meshes.text(mesh)} needs devices {devices}, which {problem}; "
                        f"{remedy(mesh, devices, machine, own)}")
    check_mesh(mesh, devices, machine, own)
    return _on(roles, devices, mesh)


def _interleave(
    roles: Sequence[str], machine: Machine, mesh: Mapping[str, int], limits: Mapping[str, Limits]
) -> dict[str, RolePlacement]:
    """Trained roles on all devices of the mesh, the others on exclusive parts of them."""
    trained = [name for name in roles if role_of(name).trained]
    scoring = [name for name in roles if name not in trained]
    if len(scoring) < 2:
        raise UserError(f"placement interleave needs two roles that only score, to run at the same time, but the run has "
                        f"{scoring[0] if scoring else 'none'}; use flat")
    placed = _flat(trained, machine, mesh, limits)
    count = meshes.size(mesh)
    parts = _parts(scoring, count, machine)
    if parts is None:
        able = [n for n in range(2, machine.count + 1) if possible(DeviceSlice(0, n), machine) and _parts(scoring, n, machine)]
        near = [meshes.nearest(mesh, n, meshes.joint(_by_role(trained, limits).values()))
                for n in sorted(able, key=lambda n: abs(n - count))]
        other = next((f"the mesh {meshes.text(sizes)}" for sizes in near if sizes is not None), "")
        raise UserError(f"placement interleave cannot divide {count} device{'s' * (count > 1)} into parts of whole hosts for "
                        f"{' and '.join(scoring)}; use {f'{other} or ' if other else ''}flat")
    for names, devices in parts.items():
        for name in names:
            own = meshes.nearest(mesh, devices.count, limits_of(limits, name),
                                 [axis for axis in meshes.AXES if axis in ("data", "fsdp", "tensor") or mesh[axis] > 1])
            placed[name] = RolePlacement(name, devices, _required(own, name, mesh, devices, machine, limits))
    return {name: placed[name] for name in roles}


def _parts(scoring: Sequence[str], count: int, machine: Machine) -> dict[tuple[str, ...], DeviceSlice] | None:
    """The exclusive parts, at least two, of the first `count` devices, by the roles on each; None if there are none."""
    alone = [("reference",)] if "reference" in scoring else []
    others = [name for name in scoring if name != "reference"]
    left = 1 / (1 + len(alone))
    for groups in range(len(others), 0 if alone else 1, -1):
        if count % ((1 + len(alone)) * groups) == 0 and count >= groups:
            shared = [tuple(name for i, name in enumerate(others) if i * groups // len(others) == g) for g in range(groups)]
            names = {"+".join(part): part for part in (*alone, *shared)}
            shares = dict.fromkeys(names, left / groups) | ({"reference": left} if alone else {})
            parts = {names[label]: devices for label, devices in allocate(shares, count).items()}
            if all(possible(devices, machine) for devices in parts.values()):
                return parts
    return None


def _required(
    mesh: Mapping[str, int] | None, role: str, wanted: Mapping[str, int], devices: DeviceSlice, machine: Machine,
    limits: Mapping[str, Limits], axes: Sequence[str] = meshes.AXES,
) -> Mapping[str, int]:
    """The mesh that was found for a role. Raises UserError if there is none."""
    if mesh is None:
        raise UserError(f"no mesh of devices {devices} divides the heads and the batch of {role}; with placement custom, "
                        f"{remedy(wanted, devices, machine, _by_role([role], limits), axes)}")
    return mesh


def _separate(
    roles: Sequence[str], machine: Machine, mesh: Mapping[str, int], generation_devices: int, limits: Mapping[str, Limits]
) -> dict[str, RolePlacement]:
    """Trained roles on the first devices, and on the remaining ones their shadows and the other roles."""
    trained = [name for name in roles if role_of(name).trained]
    training, inference = _split(machine, generation_devices)
    trained_limits = _by_role(trained, limits)
    problem = mesh_problem(mesh, training, trained_limits)
    if problem:
        near = _nearest_split(mesh, training, machine, trained_limits, bool(generation_devices))
        raise UserError(f"the mesh {meshes.text(mesh)} {problem}; {near or remedy(mesh, training, machine, trained_limits)}")
    placed = _on(trained, training, mesh)
    within = host_part(inference, machine)
    for name in (*(SHADOWS[name] for name in trained), *(name for name in roles if name not in trained)):
        tensor = mesh["tensor"]
        wanted = {**meshes.complete({"tensor": tensor}), "data": max(1, inference.count // tensor)}
        own = meshes.nearest(wanted, inference.count, limits_of(limits, name), meshes.INFERENCE_AXES, within)
        own = _required(own, name, wanted, inference, machine, limits, meshes.INFERENCE_AXES)
        placed[name] = RolePlacement(name, inference, own)
    return placed


def _nearest_split(
    mesh: Mapping[str, int], training: DeviceSlice, machine: Machine, limits: Mapping[str, Limits], asked: bool
) -> str:
    """The end of an error about the mesh of training: the nearest mesh, number of generation devices, or both; "" if none.

    asked: whether the config sets the number of generation devices. If it does, the mesh is kept if another number allows it.
    """
    axes = [axis for axis in meshes.AXES if axis in ("data", "fsdp", "tensor") or mesh[axis] > 1]
    wanted = meshes.size(mesh) if asked else training.count
    for left in sorted(_able(machine), key=lambda n: (abs(machine.count - n - wanted), -n)):
        count = machine.count - left
        near = meshes.nearest(mesh, count, meshes.joint(limits.values()), axes)
        if near is not None:
            flags = [meshes.text(near)] if near != mesh else []
            flags += [f"config.placement.generation_devices={left}"] if count != training.count else []
            return f"{' with '.join(flags)} would work"
    return ""


def _sides(machine: Machine, generation: int) -> tuple[DeviceSlice, DeviceSlice]:
    """The devices for training, and the last ones for inference."""
    training = machine.count - generation
    return DeviceSlice(0, training), DeviceSlice(training, generation)


def _able(machine: Machine) -> list[int]:
    """The possible numbers of devices for inference: those for which both sides are possible."""
    return [n for n in range(1, machine.count) if all(possible(side, machine) for side in _sides(machine, n))]


def _split(machine: Machine, generation_devices: int) -> tuple[DeviceSlice, DeviceSlice]:
    """The devices for training and those for inference. Raises UserError if a side has none, splits a host or mixes kinds."""
    count, able = machine.count, _able(machine)
    best = min(able, key=lambda n: abs(n - (generation_devices or count / 2)), default=None)
    if best is None:
        raise UserError(f"placement separate cannot divide the {count} device{'s' * (count > 1)} of this machine into two "
                        "sides, each of one kind and of whole hosts; use flat")
    named = f"config.placement.generation_devices is {generation_devices}"
    near = f"{best} would work with a config.mesh of {count - best} device{'s' * (count - best > 1)}"
    if not 0 <= generation_devices < count:
        raise UserError(f"{named} of {count} devices, which leaves none for "
                        f"{'training' if generation_devices > 0 else 'generation'}; {near}")
    if generation_devices not in (0, best):
        for name, side in zip(("training", "generation"), _sides(machine, generation_devices), strict=True):
            problem = slice_problem(side, machine)
            if problem:
                raise UserError(f"{named}, so that devices {side} for {name} {problem}; {near}")
    return _sides(machine, best)
