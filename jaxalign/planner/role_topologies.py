"""The flag --topology: one topology for all roles, or one for each group of roles."""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.errors import UserError
from jaxalign.placement.roles import role_of
from jaxalign.planner.gpu_topology import GpuTopology
from jaxalign.planner.hardware import Cluster, topology_cluster
from jaxalign.planner.topology import Topology, parse_topology

RoleTopology = tuple[tuple[str, ...], Topology | GpuTopology]
"""(the roles on a topology, the topology); no roles for a topology of all of them."""


def parse_topologies(text: str, slices: int = 1) -> list[RoleTopology]:
    """Reads "v5p:2x2x4"; "policy+critic=v5p:2x2x4,generator+reference+reward=v5e:2x4" for groups of roles; or
    "v5p:2x2x4,v5e:2x4" for several machines without roles.

    Raises:
      UserError: the text is malformed, a topology or a role does not exist, or a role has two topologies.
    """
    if "," not in text and "=" not in text:
        return [((), parse_topology(text, slices))]
    groups: list[RoleTopology] = []
    for part in text.split(","):
        names, equals, topology = part.strip().partition("=")
        if not equals and "=" in text:
            raise UserError(f"--topology has {part!r}; expected roles and their topology, as in policy+critic=v5p:2x2x4")
        roles, topology = (tuple(names.split("+")), topology) if equals else ((), part.strip())
        for role in roles:
            role_of(role)
            if any(role in others for others, _ in groups) or roles.count(role) > 1:
                raise UserError(f"--topology names {role} twice; give each role one topology")
        groups.append((roles, parse_topology(topology)))
    if slices > 1:
        raise UserError(f"config.mesh.slices is {slices}, but --topology has several topologies; set config.mesh.slices to 1")
    return groups


def clusters_of(groups: Sequence[RoleTopology]) -> list[Cluster]:
    """The devices of the groups."""
    return [topology_cluster(topology) for _, topology in groups]


def require_placement(groups: Sequence[RoleTopology], strategy: str) -> None:
    """Raises UserError if roles have topologies of their own without a placement that says so."""
    if strategy in ("flat", "auto") and any(roles for roles, _ in groups):
        first, entries = 0, []
        for roles, topology in groups:
            entries.append(f"{'+'.join(roles)}={first}-{first + topology.chips - 1}")
            first += topology.chips
        raise UserError(f"--topology gives roles their own devices, but config.placement.strategy is {strategy}; set it to "
                        f"custom, with --config.placement.roles={','.join(entries)} or such entries with meshes")
