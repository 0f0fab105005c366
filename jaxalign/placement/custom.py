"""Placement entries of the user, such as "policy+critic=0-3:fsdp=4"."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.checks import check_mesh, check_pairs, check_slice, limits_of, possible
from jaxalign.placement.machine import Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.plan import RolePlacement
from jaxalign.placement.roles import SHADOWS, role_of
from jaxalign.placement.slices import DeviceSlice

_FORM = re.compile(r"(?P<roles>[^=:]+)=(?P<first>\d+)(?:-(?P<last>\d+))?(?::(?P<mesh>.+))?")
_AXIS = re.compile(r"([^=]+)=(\d+)")
_EXAMPLE = "policy+critic=0-3:fsdp=4"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A placement entry.

    Attributes:
      roles: the roles that share the devices and the mesh.
      devices: their devices.
      mesh: the sizes of all mesh axes, or None if the entry has none.
    """

    roles: tuple[str, ...]
    devices: DeviceSlice
    mesh: Mapping[str, int] | None


def parse_entry(entry: str) -> Entry:
    """Reads an entry: roles joined by +, =, the first and the last device, and optionally a colon and the mesh.

    Raises:
      UserError: the entry is malformed, or a role or a mesh axis does not exist.
    """
    match = _FORM.fullmatch("".join(entry.split()))
    if match is None:
        raise UserError(f"placement entry {entry!r} must have roles, devices and optionally a mesh, as in {_EXAMPLE}")
    roles = tuple(match["roles"].split("+"))
    for name in roles:
        role_of(name)
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise UserError(f"placement entry {entry!r} has no device, as {last} is before {first}; {last}-{first} would work")
    mesh = None
    if match["mesh"] is not None:
        axes = [_AXIS.fullmatch(part) for part in match["mesh"].split(",")]
        if None in axes or len({axis[1] for axis in axes}) < len(axes):
            raise UserError(f"the mesh of placement entry {entry!r} must be distinct axes with their sizes, as in {_EXAMPLE}")
        mesh = meshes.complete({axis[1]: int(axis[2]) for axis in axes})
    return Entry(roles, DeviceSlice(first, last - first + 1), mesh)


def place(
    entries: Iterable[str], roles: Sequence[str], machine: Machine, limits: Mapping[str, Limits]
) -> dict[str, RolePlacement]:
    """The placements of the entries. Without a mesh, a trained role has all its devices on fsdp, any other on data.

    Raises:
      UserError: an entry is malformed, its devices or its mesh are not possible, or a role has no devices or two entries.
    """
    placed: dict[str, RolePlacement] = {}
    for entry in map(parse_entry, entries):
        for name in entry.roles:
            _check_name(name, roles, placed)
            mesh = entry.mesh or meshes.complete({"fsdp" if role_of(name).trained else "data": entry.devices.count})
            placed[name] = RolePlacement(name, entry.devices, mesh)
        check_slice(" and ".join(entry.roles), entry.devices, machine)
        for name in entry.roles:
            # Roles of an entry with a mesh keep sharing it, so the nearest mesh must suit all of them.
            sharing = entry.roles if entry.mesh else (name,)
            check_mesh(placed[name].mesh, entry.devices, machine, {role: limits_of(limits, role) for role in sharing},
                       meshes.INFERENCE_AXES if "generator" in sharing else meshes.AXES)
    for name in roles:
        if name not in placed:
            raise UserError(f"{name} has no devices; add the entry {_entry(name, placed, machine, limits_of(limits, name))}")
    check_pairs(placed, machine)
    return placed


def _check_name(name: str, roles: Sequence[str], placed: Mapping[str, RolePlacement]) -> None:
    """Raises UserError if a role has a second entry, or if the run has neither the role nor the one that it shadows."""
    if name in placed:
        raise UserError(f"{name} has two entries, with devices {placed[name].devices} first; leave one of them out")
    role = role_of(name)
    if name not in roles and role.shadows not in roles:
        shadows = [SHADOWS[own] for own in roles if own in SHADOWS]
        raise UserError(f"an entry places {name}, which this run does not have; its roles are {', '.join(roles)}, and "
                        f"{' and '.join(shadows)} may be added")


def _entry(name: str, placed: Mapping[str, RolePlacement], machine: Machine, limits: Limits) -> str:
    """An entry for a role that has none: on the devices of another role, or else on all devices, if they work."""
    own = "fsdp" if role_of(name).trained else "data"
    for devices in (*dict.fromkeys(place.devices for place in reversed(placed.values())), machine.devices):
        wanted = meshes.complete({own: devices.count})
        mesh = meshes.nearest(wanted, devices.count, limits, ("data", "fsdp", "tensor"))
        if mesh is not None and possible(devices, machine):
            try:
                check_pairs({**placed, name: RolePlacement(name, devices, mesh)}, machine)
            except UserError:
                continue
            return f"{name}={devices}" + ("" if mesh == wanted else f":{meshes.text(mesh)}")
    return f"{name}=FIRST-LAST"
