"""Reports the estimate of stages with a placement as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxalign.placement import meshes
from jaxalign.planner.placed_estimate import PlacedStage
from jaxalign.tracking.table import ruled

GB = 1e9


def lines(stages: Sequence[PlacedStage]) -> list[str]:
    """For each stage, the memory of each group of devices and the time of each task."""
    return [line for stage in stages for line in ("", *_stage_lines(stage))]


def _stage_lines(stage: PlacedStage) -> list[str]:
    title = f"Stage {stage.stage} with placement {stage.placement.strategy}"
    groups = [["devices", "of", "roles", "peak", "usable", "", "resident", "largest task", "adds"]]
    for group in stage.groups:
        roles = [role for role, place in stage.placement.roles.items() if place.devices.covers(group.devices)]
        groups.append([
            str(group.devices), group.cluster.name, ", ".join(roles), f"{group.peak / GB:.2f}",
            f"{group.cluster.usable / GB:.1f}", "" if group.fits else "does not fit",
            f"{sum(group.resident.values()) / GB:.2f}", group.largest, f"{group.temporary[group.largest] / GB:.2f}",
        ])
    times = [["task", "devices", "mesh", "seconds", "bound by", "calls per iteration", "seconds per iteration"]]
    for role, calls, each in stage.tasks:
        place = stage.placement.roles[role]
        times.append([f"{each.task.phase} ({', '.join(each.task.runs)})", str(place.devices), meshes.text(place.mesh),
                      f"{each.seconds:.3g}", each.bound, f"{calls:g}", f"{each.seconds * calls:.3g}"])
    moves = [f"The {role} receives its weights in {seconds:.3g} s." for role, seconds in stage.moves.items() if seconds]
    whole = (f"An iteration takes {stage.iteration:.3g} s, with tasks on different devices at the same time; "
             f"{stage.iterations:,} iterations take {stage.seconds / 3600:.3g} hours.")
    worlds = [] if stage.one_program else [_SEVERAL]
    return [f"{title}: memory, GB on each device", *ruled(groups), "", f"{title}: time", *ruled(times), *moves, whole, *worlds]


_SEVERAL = ("One program cannot run this placement: its devices are on several hosts or of several kinds, which needs several "
            "worlds, and a run has one process for all devices of a placement.")
"""The sentence on a placement that no run accepts."""


def to_json(stages: Sequence[PlacedStage]) -> list[dict[str, Any]]:
    """The same figures, unrounded."""
    return [{
        "stage": stage.stage, **stage.placement.to_dict(), "one_program": stage.one_program, "fits": stage.fits,
        "iteration_seconds": stage.iteration, "iterations": stage.iterations, "seconds": stage.seconds,
        "moved_seconds": dict(stage.moves),
        "groups": [{
            "devices": str(group.devices), "cluster": group.cluster.name, "usable_bytes": group.cluster.usable,
            "peak_bytes": group.peak, "resident_bytes": dict(group.resident), "temporary_bytes": dict(group.temporary),
        } for group in stage.groups],
        "tasks": [{
            "role": role, "phase": each.task.phase, "models": list(each.task.runs), "calls_per_iteration": calls,
            "seconds": each.seconds, "compute_seconds": each.compute, "memory_seconds": each.memory,
            "network_seconds": each.network, "bound": each.bound,
        } for role, calls, each in stage.tasks],
    } for stage in stages]
