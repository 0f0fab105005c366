"""Compares placements of stage ppo on machines of unlike kinds, by time and by cost.

A placement that uses one machine is one of `placement_choices` on that machine, which one program can run. A placement that
uses several machines needs a JAX world on each of them. It is listed for its time or its cost, but no run accepts it.
"""

from __future__ import annotations

import dataclasses

from jaxalign.errors import UserError
from jaxalign.placement.custom import place
from jaxalign.planner.hardware import Cluster
from jaxalign.planner.micro_batches import ALIKE
from jaxalign.planner.placed_estimate import machine_of, owner_of
from jaxalign.planner.placement_choices import (
    Choice,
    fitting_parts,
    idle_share,
    joined,
    mesh_of_other_stages,
    notes_on,
    placement_choices,
    problem_of,
    refusal,
    role_limits,
)
from jaxalign.planner.placement_schedules import search_schedules
from jaxalign.planner.placement_search import Devices, Found, Problem, with_prices
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.role_models import Workload
from jaxalign.planner.search import Given

KEPT = 3
"""The placements that are listed for their time, and as many for their cost."""


@dataclasses.dataclass(frozen=True)
class KindChoice:
    """A placement on one or several machines.

    Attributes:
      found: the placement; its devices are numbered through all machines.
      idle: the share of an iteration in which a device of the machines that it uses is idle, the mean over the devices.
      cost: the price of an iteration on the devices in use; None without prices.
      machines: the names of the machines that it uses.
      choice: the placement as a config; None if one program cannot run it.
    """

    found: Found
    idle: float
    cost: float | None
    machines: tuple[str, ...]
    choice: Choice | None = None

    @property
    def one_program(self) -> bool:
        return self.choice is not None


@dataclasses.dataclass(frozen=True)
class KindChoices:
    """Placements on unlike machines.

    Attributes:
      listed: the fastest and, with prices, the cheapest placements, and the fastest that one program can run; fastest first.
      refused: sentences that say why a machine alone, or all of them together, have no placement.
      workload: the rows of an iteration; None if no placement was searched.
      notes: what the figures do not include.
    """

    listed: tuple[KindChoice, ...] = ()
    refused: tuple[str, ...] = ()
    workload: Workload | None = None
    notes: tuple[str, ...] = ()

    @property
    def fastest_program(self) -> KindChoice | None:
        """The fastest placement that one program can run."""
        return next((one for one in self.listed if one.one_program), None)

    @property
    def cheapest(self) -> KindChoice | None:
        """The cheapest placement; None without prices."""
        priced = [one for one in self.listed if one.cost is not None]
        return min(priced, key=lambda one: one.cost, default=None)


def kind_choices(given: Given, prices: DevicePrices | None = None) -> KindChoices | None:
    """The placements of stage ppo on the machines of a plan, of which `given.others` has all but the first; None without ppo.

    Raises:
      UserError: the prices have none for one of the kinds.
    """
    if "ppo" not in given.config.stages:
        return None
    alone = [dataclasses.replace(given, cluster=cluster, others=()) for cluster in (given.cluster, *given.others)]
    every, refused, first = [], [], 0
    for one in alone:
        choices = placement_choices(one)
        if choices.refused:
            refused.append(f"{one.cluster.name}: {choices.refused}")
        every += [_on_one(one.cluster, choice, first, prices) for choice in choices.best]
        first += one.cluster.devices
    together, problem, sentence = _together(given, alone, prices)
    refused += [sentence] if sentence else []
    every += together
    if problem is None:
        return KindChoices(refused=tuple(refused))
    return KindChoices(tuple(_listed(every)), tuple(refused), problem.workload, notes_on(given, problem))


def _on_one(cluster: Cluster, choice: Choice, first: int, prices: DevicePrices | None) -> KindChoice:
    """A placement on one machine, whose devices are numbered from `first`."""
    found = choice.found
    used = cluster.devices - found.unused
    cost = None
    if prices is not None:
        (priced,) = with_prices([Devices(cluster.chip, cluster.devices)], prices)
        cost = found.seconds / 3600 * used * priced.hourly
    slices = tuple(dataclasses.replace(part, start=part.start + first) for part in found.slices)
    return KindChoice(dataclasses.replace(found, slices=slices), choice.idle, cost, (cluster.name,), choice)


def _together(given: Given, alone: list[Given], prices: DevicePrices | None) -> tuple[list[KindChoice], Problem | None, str]:
    """(placements that use several machines, the problem, a sentence that says why there are none)."""
    # A placement can divide a cluster of one host with several devices, so such a cluster is preferred.
    preferred = max((one.cluster for one in alone), key=lambda cluster: (cluster.hosts == 1, cluster.devices))
    refused = refusal(dataclasses.replace(given, cluster=preferred))
    base = None if refused else next((run for one in alone if (run := mesh_of_other_stages(one)) is not None), None)
    if base is None:
        return [], None, refused or "no machine fits the stages other than ppo with mesh.generation=tensor"
    devices = tuple(Devices(one.cluster.chip, one.cluster.devices) for one in alone)
    devices = devices if prices is None else with_prices(devices, prices)
    problem = dataclasses.replace(problem_of(given, base), devices=devices)
    found: dict[tuple, Found] = {}
    for objective in ("time", "cost") if prices is not None else ("time",):
        try:
            some = search_schedules(problem, objective)
        except UserError as error:
            return [], problem, str(error)
        found |= {(one.schedule, one.entries): one for one in some}
    machines = [one.cluster for one in alone]
    listed = []
    for one in found.values():
        used = tuple(dict.fromkeys(owner_of(machines, part).name for part in one.slices))
        option = next((option for _, option in fitting_parts(given, problem, one)), None) if len(used) > 1 else None
        if option is not None and _resolves(option, problem, machines):
            cost = None if one.cost is None else one.cost * option.seconds / one.seconds
            listed.append(KindChoice(option, idle_share(problem, option), cost, used))
    return listed, problem, ""


def _resolves(found: Found, problem: Problem, machines: list[Cluster]) -> bool:
    """Whether the entries keep the rules of placements on these machines."""
    limits = role_limits(problem)
    try:
        place(joined(found.entries), tuple(limits), machine_of(machines), limits)
    except UserError:
        return False
    return True


def _listed(every: list[KindChoice]) -> list[KindChoice]:
    """The placements to list, fastest first; of equal ones, those that one program can run, and those with fewer sets."""
    if not every:
        return []
    fastest = min(one.found.seconds for one in every)

    def by_time(one: KindChoice) -> tuple:
        return max(one.found.seconds, ALIKE * fastest), not one.one_program, len(one.found.sets), one.found.seconds

    order = sorted(every, key=by_time)
    cheap = sorted((one for one in every if one.cost is not None), key=lambda one: (one.cost, one.found.seconds))
    program = [one for one in order if one.one_program][:1]
    kept = {id(one): one for one in (*order[:KEPT], *cheap[:KEPT], *program)}
    return sorted(kept.values(), key=by_time)
