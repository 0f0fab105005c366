"""The best meshes of roles that share devices, and the time of each phase on them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxalign.planner.hardware import Chip
from jaxalign.planner.role_models import PHASES, ExecutionModel, RoleModel, Workload
from jaxalign.planner.role_times import RoleTimes, TaskVariant, role_options

_FREE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Shares of a device's memory for temporary arrays: each gives the roles' meshes that leave so much and are fastest with it."""


@dataclasses.dataclass(frozen=True)
class SetMember:
    """A role of a set: the role, its times with the chosen mesh, and the chosen variant of its task in each phase."""

    role: RoleModel
    times: RoleTimes
    variants: Mapping[str, TaskVariant]

    @property
    def moved(self) -> float:
        """Seconds in which the weights move from the mesh of training to that of generation."""
        return sum(variant.moved for variant in self.variants.values())


@dataclasses.dataclass(frozen=True)
class PlacedSet:
    """Roles that take turns on the same devices.

    Attributes:
      members: the roles.
      chip, count: the devices.
      usable: bytes of a device's memory available to a program.
      beside: bytes that roles of other sets on the same devices take.
    """

    members: tuple[SetMember, ...]
    chip: Chip
    count: int
    usable: float
    beside: float = 0.0

    @functools.cached_property
    def phases(self) -> dict[str, dict[str, float]]:
        """By phase, the seconds of each role that runs in it."""
        return {phase: {one.role.role: one.variants[phase].seconds for one in self.members if phase in one.variants}
                for phase in PHASES}

    @functools.cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each phase: the roles take turns."""
        return tuple(math.fsum(self.phases[phase].values()) for phase in PHASES)

    @property
    def moved(self) -> float:
        """Seconds in which weights move between meshes."""
        return math.fsum(one.moved for one in self.members)

    @property
    def resident(self) -> float:
        """Bytes on a device of all weights and optimizer states."""
        return math.fsum(one.times.resident for one in self.members)

    @property
    def peak(self) -> float:
        """Bytes on a device: all resident ones, and the temporary arrays of the largest task."""
        return (self.resident + self.beside
                + max(variant.temporary for one in self.members for variant in one.variants.values()))


def names(roles: Sequence[RoleModel]) -> tuple[str, ...]:
    """The names of roles."""
    return tuple(role.role for role in roles)


@functools.lru_cache(maxsize=16384)
def place_set(roles: tuple[RoleModel, ...], chip: Chip, count: int, workload: Workload, engine: ExecutionModel,
              shadowed: frozenset[str] = frozenset(), beside: float = 0.0) -> PlacedSet | None:
    """The roles on `count` chips with the meshes that minimise the sum of their times; None if no meshes fit.

    Args:
      roles: the roles that share the devices.
      chip, count: the devices.
      workload: the rows of an iteration.
      engine: how programs run.
      shadowed: roles that have a shadow on other devices.
      beside: bytes of a device that other arrays take.
    """
    usable = chip.usable - beside
    options = [role_options(role, chip, count, workload, engine, role.role in shadowed) for role in roles]
    if not all(options):
        return None
    best, best_seconds = None, math.inf
    for free in (share * usable for share in _FREE):
        shortlists = [_shortlist(some, free, usable) for some in options]
        for combination in itertools.product(*shortlists):
            times, residents, seconds = zip(*combination, strict=True)
            if sum(seconds) < best_seconds and sum(residents) + free <= usable:
                best, best_seconds = times, sum(seconds)
    if best is None:
        return None
    left = usable - math.fsum(times.resident for times in best)
    members = tuple(
        SetMember(role, times, {phase: times.fastest(phase, left) for phase in times.tasks})
        for role, times in zip(roles, best, strict=True)
    )
    return PlacedSet(members, chip, count, chip.usable, beside)


def _shortlist(options: Sequence[RoleTimes], free: float, usable: float) -> list[tuple[RoleTimes, float, float]]:
    """(a role's times with a mesh, its resident bytes, seconds of its tasks) if `free` bytes are left, without meshes that need
    more memory than another one and are no faster."""
    timed = []
    for times in options:
        chosen = [times.fastest(phase, free) for phase in times.tasks]
        if None not in chosen and times.resident + free <= usable:
            timed.append((times, times.resident, sum(one.seconds + one.moved for one in chosen)))
    shortlist: list[tuple[RoleTimes, float, float]] = []
    for one in sorted(timed, key=lambda one: one[1:]):
        if not shortlist or one[2] < shortlist[-1][2]:
            shortlist.append(one)
    return shortlist


def counts(chip: Chip, most: int) -> tuple[int, ...]:
    """Numbers of chips that a set of roles may have: powers of two within a host, then whole hosts.

    Of more than 16 hosts, and of TPUs, whose slices have axes of powers of two, only powers of two and the whole machine.
    """
    host = chip.chips_per_host
    within = [1 << power for power in range(host.bit_length()) if 1 << power < host]
    hosts = range(1, most // host + 1)
    if chip.kind == "tpu" or len(hosts) > 16:
        hosts = [n for n in hosts if n & (n - 1) == 0]
    some = {count for count in (*within, *(n * host for n in hosts)) if count <= most}
    return tuple(sorted(some | ({most} if chip.kind == "gpu" and (most < host or most % host == 0) else set())))


def smallest(roles: tuple[RoleModel, ...], chip: Chip, workload: Workload, engine: ExecutionModel) -> int | None:
    """The smallest number of chips, up to the largest machine of their kind, on which roles fit together; None if none."""
    most = chip.largest if chip.kind == "tpu" or chip.host_network is not None else chip.chips_per_host
    ladder = itertools.chain(counts(chip, min(most, 16 * chip.chips_per_host)),
                             (2**power for power in range(7, 15) if 16 * chip.chips_per_host < 2**power <= most))
    return next((count for count in ladder if place_set(roles, chip, count, workload, engine)), None)
