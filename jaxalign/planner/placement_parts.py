"""A placement of the search as a run executes it: with the micro-batches of `ppo.micro_batch_tokens`, with one program for the
update of a policy and a critic that share a mesh, and with the checks of step 0."""

from __future__ import annotations

import dataclasses
import math

from jaxalign.placement.roles import role_of
from jaxalign.planner.memory import GPU_GAPS
from jaxalign.planner.placement_schedules import INTERLEAVE
from jaxalign.planner.placement_search import Found, Problem
from jaxalign.planner.placement_sets import PlacedSet, SetMember
from jaxalign.planner.role_models import GENERATION, PHASES, SCORING, TRAINING, part_of, placed
from jaxalign.steps.packed import part_rows


def samples_at_once(found: Found) -> bool:
    """Whether a placement samples the whole batch at once, as a run does."""
    members = [one for group in found.sets for one in group.members]
    return all(one.variants[GENERATION].parts == 1 for one in members if GENERATION in one.variants)


def in_parts(found: Found, tokens: int, problem: Problem) -> Found:
    """The placement with the micro-batches of `ppo.micro_batch_tokens`; 0 is the default of a run."""
    sets = [_as_run(group, found, tokens, problem) for group in found.sets]
    if found.schedule == INTERLEAVE:  # The first set is on all devices, the others are on parts of them.
        main, *scorers = sets
        sets[0] = dataclasses.replace(main, beside=max(group.resident for group in scorers))
    phases = {phase: max(sum(group.phases[phase].values()) for group in sets) for phase in PHASES}
    if found.schedule == INTERLEAVE:
        phases[SCORING] = sum(sets[0].phases[SCORING].values()) + max(sum(group.phases[SCORING].values()) for group in sets[1:])
    return dataclasses.replace(found, sets=tuple(sets), phases=phases, seconds=math.fsum(phases.values()) + found.moved)


def _as_run(group: PlacedSet, found: Found, tokens: int, problem: Problem) -> PlacedSet:
    workload = problem.workload
    length = workload.prompt + workload.new
    where = {one.role.role: (other.chip, slice_, one.times.mesh) for other, slice_ in zip(found.sets, found.slices, strict=True)
             for one in other.members}
    no_values = workload.values_in_update and where.get("critic") == where["policy"]
    members = []
    for one in group.members:
        if no_values and one.role.role == "value":
            continue  # The role is optional, and this run does not use it.
        copies, variants = one.times.mesh["data"] * one.times.mesh["fsdp"], {}
        for phase, chosen in one.variants.items():
            if no_values and phase == SCORING and one.role.role == "critic":
                continue
            if phase != GENERATION:
                total = workload.batch // (workload.minibatches if phase == TRAINING else 1)
                parts = min(part_rows(total, length, tokens, copies, copies)[1], max(v.parts for v in one.times.tasks[phase]))
                chosen = min((v for v in one.times.tasks[phase] if v.parts >= parts), key=lambda variant: variant.parts)
            if phase == TRAINING:
                beside = _beside(one, group, chosen.parts, problem)
                if role_of(one.role.role).name == "policy" and where.get("reference", where["policy"]) != where["policy"]:
                    # The checks of step 0 copy the reference to the policy's mesh until the first update.
                    beside += placed(one.role, one.times.mesh, part_of(group.chip, group.count), problem.engine)[1].parameters
                chosen = dataclasses.replace(chosen, temporary=chosen.temporary + beside)
            variants[phase] = chosen
        members.append(dataclasses.replace(one, variants=variants))
    return dataclasses.replace(group, members=tuple(members))


def _beside(one: SetMember, group: PlacedSet, parts: int, problem: Problem) -> float:
    """Bytes of the casts and tables of other roles that the program of an update also trains: those with the same mesh."""
    size = 0.0
    for other in group.members:
        if other is not one and other.role.trained and other.times.mesh == one.times.mesh and other.role.model.lora is None:
            own = placed(other.role, other.times.mesh, part_of(group.chip, group.count), problem.engine)[1]
            size += own.casts + (own.table if parts > 1 else 0.0)
    return size * GPU_GAPS if group.chip.kind == "gpu" else size
