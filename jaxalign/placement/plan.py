"""A placement: the devices and the mesh of every role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxalign.placement import meshes
from jaxalign.placement.roles import role_of
from jaxalign.placement.slices import DeviceSlice


@dataclasses.dataclass(frozen=True)
class RolePlacement:
    """Where a role runs.

    Attributes:
      role: the role, or "reward.NAME" for one of several reward models.
      devices: its devices.
      mesh: the size of each mesh axis; their product is the number of devices.
    """

    role: str
    devices: DeviceSlice
    mesh: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the roles of a run are placed.

    Attributes:
      strategy: the strategy that the placement comes from.
      roles: the placement of each role, including the shadows that the strategy adds.
    """

    strategy: str
    roles: Mapping[str, RolePlacement]

    @property
    def groups(self) -> dict[DeviceSlice, tuple[str, ...]]:
        """The roles on each distinct slice, by first device and then from the longest slice to the shortest."""
        slices = sorted({placed.devices for placed in self.roles.values()}, key=lambda part: (part.start, -part.count))
        return {devices: tuple(name for name, placed in self.roles.items() if placed.devices == devices) for devices in slices}

    def serving(self, role: str) -> RolePlacement:
        """The placement of a role. A shadow that does not exist is served by the role that it would shadow.

        Raises:
          KeyError: the run has no such role.
        """
        return self.roles[role] if role in self.roles else self.roles[role_of(role).shadows]

    def to_dict(self) -> dict[str, Any]:
        """The placement as JSON values: devices as in "0-3", and the mesh axes larger than 1."""
        return {"strategy": self.strategy, "roles": {
            name: {"devices": str(placed.devices), "mesh": {axis: n for axis, n in placed.mesh.items() if n > 1}}
            for name, placed in self.roles.items()}}

    def describe(self) -> list[str]:
        """Lines for a terminal, one for each slice and mesh: its devices, its mesh and its roles."""
        rows: dict[tuple[str, str], list[str]] = {}
        for devices, names in self.groups.items():
            for name in names:
                role = role_of(name)
                note = " (trained)" if role.trained else f" (weights of the {role.shadows})" if role.shadows else ""
                rows.setdefault((str(devices), meshes.text(self.roles[name].mesh)), []).append(name + note)
        wide, long = (max(len(key[column]) for key in rows) for column in (0, 1))
        return [f"devices {devices:<{wide}}  {mesh:<{long}}  {', '.join(names)}" for (devices, mesh), names in rows.items()]
