"""Searches the placement of the models of reinforcement learning on a machine.

The search is that of HybridFlow (arXiv 2409.19256, Algorithm 1). For every partition of the roles into sets, sizes of device
groups are enumerated from the smallest one on which each set fits. On its devices every role has the mesh that is fastest for
it (`placement_sets`). A phase takes the maximum over sets of the sum over the roles of a set, and an iteration the sum over
phases plus the moves of weights. Rows that move between sets are neglected: they have a few bytes per token.

Differences from Algorithm 1: devices may stay unused, so that a larger machine is never slower; a set keeps to chips of one
kind; cost may be minimised instead of time; and `placement_schedules` adds schedules with a separate generator.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.slices import DeviceSlice
from jaxalign.planner.hardware import Chip, chips
from jaxalign.planner.placement_sets import PlacedSet, counts, names, place_set, smallest
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.role_models import PHASES, ExecutionModel, RoleModel, Workload, inference_mesh

Objective = Literal["time", "cost"]
SYNCHRONOUS = "synchronous"
_TASKS = {"generation": "generation", "scoring": "scoring", "training": "update"}


@dataclasses.dataclass(frozen=True)
class Devices:
    """Chips of one kind: the kind, the number of chips, and the price of one for an hour, which objective "cost" needs."""

    chip: Chip
    count: int
    hourly: float | None = None


def with_prices(devices: Sequence[Devices], prices: DevicePrices) -> tuple[Devices, ...]:
    """The devices with the prices of `prices`. Raises UserError if a chip has none."""
    for group in devices:
        if group.chip.name not in prices.hourly:
            raise UserError(f"the prices of {prices.date} have none for {group.chip.name}; add it to per_device_hour")
    return tuple(dataclasses.replace(group, hourly=prices.hourly[group.chip.name]) for group in devices)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The roles to place, the devices by kind, the rows of an iteration, and how programs run."""

    roles: tuple[RoleModel, ...]
    devices: tuple[Devices, ...]
    workload: Workload
    engine: ExecutionModel = dataclasses.field(default_factory=ExecutionModel)

    @property
    def count(self) -> int:
        return sum(group.count for group in self.devices)


@dataclasses.dataclass(frozen=True)
class Found:
    """A placement that fits.

    Attributes:
      schedule: the schedule, "synchronous" for Algorithm 1.
      sets: the sets of roles, each on devices of its own.
      slices: the devices of each set; kinds are numbered one after another, in the order of the problem.
      phases: seconds of each phase, the maximum over the sets.
      moved: seconds in which weights move.
      seconds: seconds of an iteration.
      unused: the number of devices without a role.
      cost: the price of an iteration on the devices in use; None without prices.
    """

    schedule: str
    sets: tuple[PlacedSet, ...]
    slices: tuple[DeviceSlice, ...]
    phases: dict[str, float]
    moved: float
    seconds: float
    unused: int
    cost: float | None

    @property
    def partition(self) -> frozenset[frozenset[str]]:
        """The names of the roles of each set."""
        return frozenset(frozenset(one.role.role for one in group.members) for group in self.sets)

    @property
    def entries(self) -> tuple[str, ...]:
        """The placement as entries for `placement.custom`, such as "policy=0-63:data=8,tensor=8"."""
        return tuple(f"{one.role.role}={devices}:{meshes.text(one.times.mesh)}"
                     for group, devices in zip(self.sets, self.slices, strict=True) for one in group.members)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences that say where the time and the memory go."""
        sentences = []
        for index, phase in enumerate(PHASES):
            running = [group for group in self.sets if group.phases[phase]]
            if not running:
                continue
            slowest = max(running, key=lambda group: group.seconds[index])
            sentences.append(_phase_words(phase, slowest.seconds[index], slowest))
            for group in running:
                idle = slowest.seconds[index] - group.seconds[index]
                if idle > 0.2 * slowest.seconds[index]:
                    sentences.append(f"the devices of {_listed(names([one.role for one in group.members]))} wait {idle:.3g} s "
                                     f"in {phase}")
        tight = max(self.sets, key=lambda group: group.peak / group.usable)
        sentences.append(f"memory is tightest for {_listed(names([one.role for one in tight.members]))}: "
                         f"{tight.peak / 1e9:.1f} of {tight.usable / 1e9:.1f} GB on a device")
        return tuple(sentences)


def _phase_words(phase: str, seconds: float, group: PlacedSet) -> str:
    """What takes longest in a phase."""
    running = [one for one in group.members if phase in one.variants]
    longest = max(running, key=lambda one: one.variants[phase].seconds)
    variant = longest.variants[phase]
    where = f"{group.count} devices" if group.count > 1 else "1 device"
    mesh = meshes.text(inference_mesh(group.count, variant.tensor) if variant.tensor else longest.times.mesh)
    share = f"{variant.seconds:.3g} s of it" if len(running) > 1 else "all of it"
    return (f"{phase} takes {seconds:.3g} s; the {longest.role.role}'s {_TASKS[phase]} on {where} with {mesh} takes {share}, "
            f"bound by {variant.bound}")


def _listed(some: Sequence[str]) -> str:
    return " and ".join([", ".join(some[:-1]), some[-1]]) if len(some) > 1 else some[0]


def partitions(roles: Sequence[RoleModel]) -> Iterator[tuple[tuple[RoleModel, ...], ...]]:
    """Every partition of the roles into sets: 15 for four roles."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for size in range(len(others) + 1):
        for beside in itertools.combinations(others, size):
            rest = [role for role in others if role not in beside]
            for partition in partitions(rest):
                yield ((first, *beside), *partition)


def search(problem: Problem, objective: Objective = "time") -> list[Found]:
    """The best placement of each partition of the roles that fits, in the order of the objective.

    Raises:
      UserError: no partition fits.
    """
    best = [found for partition in partitions(problem.roles) if (found := best_allocation(problem, partition, objective))]
    if not best:
        raise impossible(problem)
    return sorted(best, key=lambda found: rank(found, objective))


def rank(found: Found, objective: Objective) -> tuple[float, float, float]:
    """The key that sorts placements: the objective, then the other one, then the number of sets."""
    cost = found.cost or 0.0
    return (cost, found.seconds, len(found.sets)) if objective == "cost" else (found.seconds, cost, len(found.sets))


def best_allocation(problem: Problem, partition: Sequence[Sequence[RoleModel]], objective: Objective = "time") -> Found | None:
    """The best placement with these sets; None if none fits."""
    options = [_set_options(problem, tuple(roles)) for roles in partition]
    if not all(options):
        return None
    # Sets with few options first, so that bounds are tight early.
    order = sorted(range(len(options)), key=lambda n: len(options[n]))
    best, best_key = None, (math.inf,)
    prices = [group.hourly or 0.0 for group in problem.devices]

    def extend(chosen: list[tuple[int, PlacedSet]], left: list[int], seconds: tuple[float, ...], moved: float) -> None:
        nonlocal best, best_key
        total = math.fsum(seconds) + moved
        hourly = sum(prices[kind] * group.count for kind, group in chosen)
        key = (total * hourly, total) if objective == "cost" else (total, hourly, sum(group.count for _, group in chosen))
        # Every further set adds to the key.
        if key >= best_key:
            return
        if len(chosen) == len(options):
            best, best_key = list(chosen), key
            return
        for kind, group in options[order[len(chosen)]]:
            if group.count <= left[kind]:
                left[kind] -= group.count
                extend([*chosen, (kind, group)], left, tuple(map(max, seconds, group.seconds)), moved + group.moved)
                left[kind] += group.count

    extend([], [group.count for group in problem.devices], (0.0,) * len(PHASES), 0.0)
    return None if best is None else assemble(problem, best)


def _set_options(problem: Problem, roles: tuple[RoleModel, ...]) -> list[tuple[int, PlacedSet]]:
    """(the index of the kind, the set on a number of its devices), fastest first, without sizes that speed up no phase."""
    options = []
    for kind, devices in enumerate(problem.devices):
        of_kind: list[PlacedSet] = []
        for count in counts(devices.chip, devices.count):
            group = place_set(roles, devices.chip, count, problem.workload, problem.engine)
            if group is None:
                continue
            dominated = any(  # By a smaller set, no phase of which is slower.
                smaller.moved <= group.moved and all(a <= b for a, b in zip(smaller.seconds, group.seconds, strict=True))
                for smaller in of_kind
            )
            if not dominated:
                of_kind.append(group)
        options += [(kind, group) for group in of_kind]
    return sorted(options, key=lambda option: math.fsum(option[1].seconds) + option[1].moved)


def assemble(problem: Problem, chosen: Sequence[tuple[int, PlacedSet]], schedule: str = SYNCHRONOUS,
             seconds: float | None = None, moved: float | None = None) -> Found:
    """A placement of sets, (index of the kind, set) each.

    seconds, moved: those of another schedule; by default the phases run one after another.
    """
    starts = list(itertools.accumulate((group.count for group in problem.devices), initial=0))
    # Larger sets first, so that sets of whole hosts start at a host and parts of a host do not cross its end.
    ordered = sorted(chosen, key=lambda one: (one[0], -one[1].count))
    slices, used = [], [0] * len(problem.devices)
    for kind, group in ordered:
        slices.append(DeviceSlice(starts[kind] + used[kind], group.count))
        used[kind] += group.count
    sets = tuple(group for _, group in ordered)
    phases = {phase: max(math.fsum(group.phases[phase].values()) for group in sets) for phase in PHASES}
    moved = math.fsum(group.moved for group in sets) if moved is None else moved
    seconds = math.fsum(phases.values()) + moved if seconds is None else seconds
    cost = None
    if all(group.hourly is not None for group in problem.devices):
        cost = seconds / 3600 * sum(problem.devices[kind].hourly * group.count for kind, group in ordered)
    return Found(schedule, sets, tuple(slices), phases, moved, seconds, problem.count - sum(used), cost)


def impossible(problem: Problem) -> UserError:
    """The error that names the smallest machine that fits."""
    machine = " and ".join(f"{group.count} {group.chip.name}" for group in problem.devices)
    fitting = []
    for devices in problem.devices:
        sizes = {}
        for roles in {roles for partition in partitions(problem.roles) for roles in partition}:
            sizes[roles] = smallest(roles, devices.chip, problem.workload, problem.engine)
        for partition in partitions(problem.roles):
            if all(sizes[roles] for roles in partition):
                fitting.append((sum(sizes[roles] for roles in partition), devices.chip.name))
    if not fitting:
        return UserError(f"no placement of {_listed(names(problem.roles))} fits on {machine}, nor on any larger machine of "
                         f"these chips; use one of {', '.join(sorted(chips()))} with more memory, or a smaller model")
    count, chip = min(fitting)
    return UserError(f"no placement of {_listed(names(problem.roles))} fits on {machine}; the smallest machine that fits has "
                     f"{count} {chip}")
