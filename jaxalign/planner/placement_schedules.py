"""Searches placements over all schedules: Algorithm 1 of `placement_search`, interleaving, and a separate generator.

With a separate generator, the policy and the critic train on one group of devices, and a copy of the policy samples on another
one, which may have chips of another kind. The roles that only score are on either side; on the generator's, a copy of the
critic computes the values. The times of an iteration are those of `schedules`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxalign.placement.roles import role_of
from jaxalign.placement.slices import DeviceSlice
from jaxalign.planner.placement_search import Found, Objective, Problem, assemble, rank, search
from jaxalign.planner.placement_sets import PlacedSet, counts, place_set
from jaxalign.planner.role_models import GENERATION, SCORING, TRAINING, RoleModel, part_of
from jaxalign.planner.role_times import transfer_seconds
from jaxalign.planner.schedules import TaskTimes, interleave, separate

FLAT, INTERLEAVE, SEPARATE = "flat", "interleave", "separate"
_UPDATES = 6
"""Simulated updates: the steady state needs no more."""


def search_schedules(problem: Problem, objective: Objective = "time", apart: bool = True) -> list[Found]:
    """The best placements over all schedules, in the order of the objective: of Algorithm 1 the best of each partition, of any
    other schedule the best one.

    Args:
      problem: the roles and the devices.
      objective: what is minimised: the time of an iteration, or its price.
      apart: whether a separate generator is among the schedules.

    Raises:
      UserError: no placement fits.
    """
    found = [dataclasses.replace(one, schedule=FLAT) if len(one.sets) == 1 else one for one in search(problem, objective)]
    for others in (interleaved(problem), separated(problem) if apart else ()):
        best = min(others, key=lambda one: rank(one, objective), default=None)
        found += [] if best is None else [best]
    return sorted(found, key=lambda one: rank(one, objective))


def task_times(sets: Sequence[PlacedSet], transfer: float, value_on_all: bool = False) -> TaskTimes:
    """The seconds of the tasks of an iteration, each on the devices of its set.

    transfer: seconds in which weights move. value_on_all: whether the critic's values are computed on the devices of training;
    they then count to the advantages, as do the log-probabilities that the policy computes again.
    """
    scoring, updates, generate, advantages, value = {}, {"policy": 0.0, "critic": 0.0}, 0.0, 0.0, 0.0
    for one in itertools.chain.from_iterable(group.members for group in sets):
        name = role_of(one.role.role).name
        for phase, variant in one.variants.items():
            if phase == GENERATION:
                generate = variant.seconds
            elif phase == TRAINING:
                updates[name] = variant.seconds
            elif name == "policy" or (name == "critic" and value_on_all):
                advantages += variant.seconds
            elif name in ("critic", "value"):
                value = variant.seconds
            else:
                scoring[one.role.role] = variant.seconds
    reference = scoring.pop("reference", 0.0)
    return TaskTimes(generate, reference, tuple(scoring.values()), value, advantages, updates["policy"], updates["critic"],
                     transfer)


def interleaved(problem: Problem) -> Iterator[Found]:
    """The policy and the critic on all devices of a kind, the other roles on equal, exclusive parts of these.

    The reference has the first half, if there is one, and the other roles share the second half.
    """
    trained = tuple(role for role in problem.roles if role.trained)
    alone = tuple(role for role in problem.roles if role.role == "reference")
    others = tuple(role for role in problem.roles if not role.trained and role not in alone)
    parts = [part for part in (alone, others) if part]
    for kind, devices in enumerate(problem.devices):
        for count in counts(devices.chip, devices.count):
            if len(parts) == 2 and count // 2 in counts(devices.chip, count):
                yield from _interleaved(problem, kind, count, trained, parts)


def _interleaved(problem: Problem, kind: int, count: int, trained: tuple[RoleModel, ...],
                 parts: Sequence[tuple[RoleModel, ...]]) -> Iterator[Found]:
    """Placements that leave a different share of the memory to the roles that only score."""
    chip = problem.devices[kind].chip
    for beside in (share * chip.usable for share in (0.05, 0.1, 0.2, 0.35, 0.5)):
        main = place_set(trained, chip, count, problem.workload, problem.engine, frozenset(), beside)
        if main is None:
            continue
        scorers = [place_set(part, chip, count // 2, problem.workload, problem.engine, frozenset(), main.resident)
                   for part in parts]
        if any(group is None or group.resident > beside for group in scorers):
            continue
        times = task_times([main, *scorers], main.moved, value_on_all=True)
        passes = list(times.scoring)
        on_parts = [passes[:1], passes[1:]]  # The reference, which comes first, and the others.
        seconds = interleave(times, _UPDATES, on_parts).seconds_per_update
        found = assemble(problem, [(kind, main)], INTERLEAVE, seconds)
        start = found.slices[0].start
        halves = tuple(DeviceSlice(start + n * count // 2, count // 2) for n in range(2))
        apart = max(math.fsum(group.phases[SCORING].values()) for group in scorers)
        phases = {**found.phases, SCORING: found.phases[SCORING] + apart}
        yield dataclasses.replace(found, sets=(main, *scorers), slices=found.slices + halves, phases=phases)


def separated(problem: Problem) -> Iterator[Found]:
    """Placements with a generator on devices of its own."""
    for kinds in itertools.product(range(len(problem.devices)), repeat=2):
        for scoring in (GENERATION, TRAINING):
            for pair in _sides(problem, kinds, scoring):
                yield _timed(problem, scoring, kinds, pair)


def _sides(problem: Problem, kinds: tuple[int, int], scoring: str) -> Iterator[tuple[PlacedSet, PlacedSet]]:
    """(the set that trains, the set that generates) on all numbers of devices. kinds: those of both sides."""
    trained = [role for role in problem.roles if role.trained]
    scorers = tuple(role for role in problem.roles if not role.trained)
    shadows = {"policy": "generator", "critic": "value"} if scoring == GENERATION else {"policy": "generator"}
    copies = tuple(dataclasses.replace(role, role=shadows[role.role]) for role in trained if role.role in shadows)
    roles = ((*trained,), copies + scorers) if scoring == GENERATION else ((*trained, *scorers), copies)
    by_side = []
    for kind, own in zip(kinds, roles, strict=True):
        chip, most = problem.devices[kind].chip, problem.devices[kind].count
        groups = (place_set(own, chip, count, problem.workload, problem.engine, frozenset(shadows))
                  for count in counts(chip, most))
        by_side.append([group for group in groups if group])
    for training, generation in itertools.product(*by_side):
        if kinds[0] != kinds[1] or training.count + generation.count <= problem.devices[kinds[0]].count:
            yield training, generation


def _timed(problem: Problem, scoring: str, kinds: tuple[int, int], pair: tuple[PlacedSet, PlacedSet]) -> Found:
    """The placement with the seconds of its schedule."""
    source, target = (part_of(group.chip, group.count) for group in pair)
    transfer = 0.0
    for one in pair[1].members:
        if role_of(one.role.role).shadows:
            shards = math.prod(one.times.mesh[axis] for axis in ("tensor", "fsdp", "pipeline"))
            transfer += transfer_seconds(one.role, shards, source, target, problem.engine)
    seconds = separate(task_times(pair, transfer), _UPDATES, scoring).seconds_per_update
    return assemble(problem, list(zip(kinds, pair, strict=True)), SEPARATE, seconds, transfer)
