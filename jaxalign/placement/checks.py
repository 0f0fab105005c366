"""The rules of placements: slices keep to hosts and kinds, meshes divide models and batches, and roles do not half overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.machine import Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.plan import RolePlacement
from jaxalign.placement.roles import independent, role_of
from jaxalign.placement.slices import DeviceSlice


def slice_problem(devices: DeviceSlice, machine: Machine) -> str:
    """Completes the sentence "the devices ..." if a slice is not possible; else empty.

    A slice is part of one host or consists of whole hosts; otherwise, hosts would have unequal parts of its mesh. All its
    devices are of one kind, because one program is compiled for all of them.
    """
    if not machine.devices.covers(devices):
        return f"do not all exist, as the machine has {machine.count}"
    kinds = machine.kinds(devices)
    if len(kinds) > 1:
        return f"are of unlike kinds ({', '.join(kinds)})"
    hosts = machine.spans(devices)
    if len(hosts) > 1:
        for index in (hosts[0], hosts[-1]):
            host = DeviceSlice(machine.starts[index], machine.hosts[index].devices)
            if not devices.covers(host):
                return f"split host {index}, which has devices {host}"
    return ""


def possible(devices: DeviceSlice, machine: Machine) -> bool:
    """Whether a slice exists, is of one kind, and is part of one host or consists of whole hosts."""
    return not slice_problem(devices, machine)


def nearest_slice(devices: DeviceSlice, machine: Machine, within: DeviceSlice | None = None) -> DeviceSlice:
    """The possible slice of which the ends are nearest to those of the given one; of two, the longer one.

    within: devices that contain the slice; None: those of the machine.
    """
    def distance(other: DeviceSlice) -> tuple[int, int]:
        return abs(other.start - devices.start) + abs(other.stop - devices.stop), -other.count

    return min(filter((within or machine.devices).covers, _slices(machine)), key=distance)


def _slices(machine: Machine) -> Iterator[DeviceSlice]:
    """All possible slices of a machine."""
    for first, host in enumerate(machine.hosts):
        start = machine.starts[first]
        for begin, end in itertools.combinations(range(start, start + host.devices + 1), 2):
            yield DeviceSlice(begin, end - begin)
        for last in range(first + 1, len(machine.hosts)):
            if machine.hosts[last].kind != host.kind:
                break
            yield DeviceSlice(start, machine.starts[last + 1] - start)


def check_slice(where: str, devices: DeviceSlice, machine: Machine) -> None:
    """Raises UserError if a slice is not possible. where: the roles on it."""
    problem = slice_problem(devices, machine)
    if problem:
        raise UserError(f"devices {devices} of {where} {problem}; devices {nearest_slice(devices, machine)} would work")


def host_part(devices: DeviceSlice, machine: Machine) -> int:
    """The largest number that divides the devices of the slice in each host: an axis of this size can stay within hosts."""
    hosts = machine.spans(devices)
    return devices.count if len(hosts) == 1 else math.gcd(*(machine.hosts[index].devices for index in hosts))


def check_mesh(
    mesh: Mapping[str, int], devices: DeviceSlice, machine: Machine, limits: Mapping[str, Limits],
    axes: Sequence[str] = meshes.AXES,
) -> None:
    """Raises UserError unless a mesh has as many devices as its slice and divides the limits of its roles.

    Args:
      mesh: the sizes of all axes.
      devices: the devices of the roles.
      machine: the machine, for the nearest placement in the error.
      limits: the limits of each role that uses the mesh.
      axes: the axes that may be above 1.
    """
    problem = mesh_problem(mesh, devices, limits, axes)
    if problem:
        raise UserError(f"the mesh {meshes.text(mesh)} {problem}; {remedy(mesh, devices, machine, limits, axes)}")


def mesh_problem(
    mesh: Mapping[str, int], devices: DeviceSlice, limits: Mapping[str, Limits], axes: Sequence[str] = meshes.AXES
) -> str:
    """Why `check_mesh` refuses a mesh, as the end of a sentence that begins with "the mesh ..."; "" if it accepts the mesh. The
    arguments are those of `check_mesh`."""
    names = " and ".join(limits)
    outside = [axis for axis in meshes.AXES if mesh[axis] > 1 and axis not in axes]
    if outside:
        return f"uses {' and '.join(outside)} for {names}, which decodes over {' and '.join(axes)} only"
    if meshes.size(mesh) != devices.count:
        have = "have" if len(limits) > 1 else "has"
        return f"has {meshes.size(mesh)} devices, but {names} {have} {devices.count} ({devices})"
    return next((f"{found} for {role}" for role, limit in limits.items() if (found := limit.problem(mesh))), "")


def remedy(
    wanted: Mapping[str, int], devices: DeviceSlice, machine: Machine, limits: Mapping[str, Limits],
    axes: Sequence[str] = meshes.AXES,
) -> str:
    """The end of an error: the nearest mesh of the slice that works for all roles, or of the slice nearest in length.

    It uses pipeline and context only if the wanted mesh does.
    """
    together = meshes.joint(limits.values())
    axes = [axis for axis in axes if axis in ("data", "fsdp", "tensor") or wanted[axis] > 1]
    # Every host runs every program of a world, so there a slice has all devices.
    counts = range(1, machine.count - devices.start + 1) if machine.processes == 1 else [machine.count]
    for count in sorted(counts, key=lambda count: (abs(count - devices.count), count)):
        part = DeviceSlice(devices.start, count)
        near = meshes.nearest(wanted, count, together, axes) if possible(part, machine) else None
        if near is not None:
            where = "" if part == devices else f" on devices {part}"
            return f"{meshes.text(near)}{where} would work"
    return "no mesh of all hosts works, so run on fewer hosts of one kind"


def check_pairs(placed: Mapping[str, RolePlacement], machine: Machine) -> None:
    """Checks how the slices of roles meet: two of them are equal, disjoint, or one contains the other.

    Roles on common devices take turns. A slice within another is allowed only if the roles never run at the same time: for the
    reference in one half and the policy on all devices, but not for the policy on all devices and the critic in one half, where
    the other half would wait for the critic's update.

    Raises:
      UserError: two slices overlap in part, or one contains the other and the roles are independent.
    """
    for (first, a), (second, b) in itertools.combinations([(name, place.devices) for name, place in placed.items()], 2):
        if a == b or a.disjoint(b):
            continue
        nested = a.covers(b) or b.covers(a)
        if nested and not independent(first, second):
            continue
        wrong = ", which may run at the same time, are nested" if nested else " overlap in part"
        raise UserError(f"devices {a} of {first} and {b} of {second}{wrong}; {_apart(first, a, second, b, machine)} would work")


def _apart(first: str, a: DeviceSlice, second: str, b: DeviceSlice, machine: Machine) -> str:
    """Devices for one of two roles that are disjoint from those of the other, such that it loses as few as possible."""
    parts = {}
    for name, whole, other in ((second, b, a), (first, a, b)):
        left = whole.without(other)
        if left is not None:
            parts[name] = nearest_slice(left, machine, left)
    name = min(parts, key=lambda name: (a if name == first else b).count - parts[name].count)
    return f"{name}={parts[name]}"


def check_roles(roles: Sequence[str]) -> None:
    """Raises UserError if the roles of a run have no policy, repeat, include shadows, or do not exist."""
    for index, name in enumerate(roles):
        role = role_of(name)
        if role.shadows:
            raise UserError(f"{name} is not a role of its own but a copy of the {role.shadows}, which a strategy adds; leave "
                            "it out of the roles")
        if name in roles[:index]:
            raise UserError(f"the roles name {name} twice; name each once, and several reward models as reward.NAME")
    if "policy" not in roles:
        raise UserError("the roles have no policy; add policy, which every placement needs")


def limits_of(limits: Mapping[str, Limits], role: str) -> Limits:
    """The limits of a role, else those of all reward models for one of them, and of the shadowed role for a shadow."""
    return limits.get(role) or limits.get(role_of(role).name) or limits.get(role_of(role).shadows) or Limits()


def check_world(strategy: str, processes: int) -> None:
    """Raises UserError if a strategy is impossible in a JAX world of several processes.

    Every process runs every program. JAX refuses to send arrays to a mesh of other hosts, and programs on a part of the hosts
    may wait for the other hosts forever.
    """
    if strategy != "flat" and processes > 1:
        raise UserError(f"placement {strategy} needs one process, but this run has {processes}, in which every role "
                        "must span all hosts; use flat")
