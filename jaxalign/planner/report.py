"""Reports a plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxalign.config import EndpointConfig, to_dict
from jaxalign.placement import meshes
from jaxalign.planner.estimate import Assumptions, RunEstimate, TaskEstimate
from jaxalign.planner.placed_estimate import PlacedStage
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.requests import PlannedRequests
from jaxalign.planner.search import mesh_words
from jaxalign.planner.weights import WeightBytes
from jaxalign.registry.stages import stages_in_order
from jaxalign.tracking.table import ruled

GB = 1e9
_PARTS = ("resident", "gradients", "casts", "activations", "KV cache", "copied layers", "weights to sample", "tables")
_SEVERAL = ("One program cannot run this placement: its devices are on several hosts or of several kinds, which needs several "
            "worlds, and a run has one process for all devices of a placement.")
"""The sentence on a placement that no run accepts."""


def text(
    run: RunEstimate, weights: dict[str, WeightBytes], name: str, assumptions: Assumptions, prices: DevicePrices | None
) -> str:
    """The tables of a plan. weights: by role."""
    cluster, mesh = run.cluster, run.config.mesh
    used = mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.pipeline
    lines = [f"{name} on {each.name}: {each.devices} device{'s' * (each.devices != 1)} on {each.hosts} "
             f"host{'s' * (each.hosts != 1)}, {each.usable / GB:.1f} GB usable on each device" for each in run.clusters]
    lines.append(f"mesh: {mesh_words(mesh)}" + (f" ({used} of {cluster.devices} devices)" if used < cluster.devices else ""))
    if run.tasks:
        lines += [
            "", f"Weights, {_unit(run)[0]} on each device", *ruled(_weight_rows(run, weights)),
            "", f"Peak memory, {_unit(run)[0]} on each device, {_usable(run)} usable", *ruled(_memory_rows(run)),
            "", f"Time per call, at {_shares(assumptions)}", *ruled(_time_rows(run)),
        ]
    if run.placed:
        lines += [*_placed_lines(run.placed), f"Times are at {_shares(assumptions)}."]
    return "\n".join([*lines, "", *_totals(run, prices)])


def _unit_of(size: float) -> tuple[str, float]:
    """(name, bytes) of the unit for sizes of which `size` is the largest: GB, or MB or KB if it is below 0.01 GB."""
    return ("GB", GB) if size >= 0.01 * GB else ("MB", 1e6) if size >= 1e6 else ("KB", 1e3)


def _unit(run: RunEstimate) -> tuple[str, float]:
    """The unit of the tables of weights and of memory."""
    return _unit_of(max(task.peak for task in run.tasks))


def _usable(run: RunEstimate) -> str:
    """The usable memory of a device, with its unit if the table has another one."""
    return f"{run.cluster.usable / GB:.1f}" + (" GB" if _unit(run)[0] != "GB" else "")


def _shares(assumptions: Assumptions) -> str:
    return (f"{assumptions.mfu:.0%} of peak FLOP/s, {assumptions.hbm:.0%} of memory bandwidth and {assumptions.network:.0%} of "
            "network bandwidth")


def verdict(run: RunEstimate) -> str:
    """A sentence that states whether the run fits."""
    needs = [(task.peak, run.cluster.usable, task.task.name) for task in run.tasks]
    needs += [(group.peak, group.cluster.usable, f"{stage.stage} {group.largest} on devices {group.devices}")
              for stage in run.placed for group in stage.groups]
    peak, usable, name = max(needs, key=lambda need: need[0] / need[1])
    unit, size = _unit_of(peak)
    where = f"{name} needs {peak / size:.1f} {unit} of the {usable / GB:.1f} GB usable on a device"
    return f"It fits: {where}." if run.fits else f"It does not fit: {where}."


def advised(changes: list[tuple[str, RunEstimate]]) -> list[str]:
    """The lines that recommend changes."""
    if not changes:
        return ["None of the changes tried makes it fit; use many more devices or a smaller model."]
    lines = ["It would fit with any one of:" if len(changes) > 1 else "It would fit with:"]
    return lines + [f"  - {words}  {figures(run)}" for words, run in changes]


def figures(run: RunEstimate) -> str:
    """The peak and, if the number of calls is known, the time of a run, in parentheses."""
    hours = f", {run.seconds / 3600:.3g} hours" if run.seconds else ""
    return f"(peak {run.peak / GB:.1f} GB{hours})"


def request_lines(planned: Sequence[PlannedRequests], settings: EndpointConfig) -> list[str]:
    """The lines on the requests to the server of `config.endpoint`; none without requests."""
    if not planned:
        return []
    rows = [["stage", "requests", "prompt tokens", "generated tokens", "price"]]
    stages = {each.stage: (each.requests, each.prompt_tokens, each.completion_tokens, each.price) for each in planned}
    if len(planned) > 1:  # A sum is unknown if one of its values is.
        stages["all"] = tuple(None if None in values else sum(values) for values in zip(*stages.values(), strict=True))
    for stage, (*counts, price) in stages.items():
        shown = ["?" if count is None else f"{count:,}" for count in counts]
        rows.append([stage, *shown, "?" if price is None else f"{price:,.2f}"])
    lines = ["", "Requests to the server, at most, without repetitions after failures", *ruled(rows)]
    if any(each.prompt_tokens is None for each in planned):
        lines.append("Set --prompt=N to the length of the longest prompt for the tokens of the requests.")
    if any(each.verdicts for each in planned):
        lines.append(f"If the server shows no log-probabilities, each verdict takes config.endpoint.votes={settings.votes} "
                     f"requests. A verdict that they do not show takes {settings.votes} requests more.")
    return lines


def _number(value: float) -> str:
    return "-" if not value else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _weight_rows(run: RunEstimate, weights: dict[str, WeightBytes]) -> list[list[str]]:
    rows = [["role", "parameters", "trained", "parameter memory", "gradients", "optimizer", "frozen base", "for sampling"]]
    trained, size = {role for task in run.tasks for role in task.task.trains}, _unit(run)[1]
    sampled = {role for task in run.tasks if task.task.phase == "generate" for role in task.task.runs}
    for role, own in weights.items():
        learns = role in trained
        # The most that the role's optimizer takes in any stage.
        optimizer = max((task.resident.get(f"{role}'s optimizer", 0.0) for task in run.tasks), default=0.0)
        rows.append([
            role, _count(own.count), _count(own.trained) if learns else "-", _number(own.parameters / size),
            _number(own.gradients / size * learns), _number(optimizer / size), _number(own.frozen / size),
            _number(own.generation / size * (role in sampled)),
        ])
    return rows


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _count(number: float) -> str:
    large = f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
    return large if number >= 1e5 else f"{number / 1e3:.2f}K"


def _memory_rows(run: RunEstimate) -> list[list[str]]:
    sizes = [{"resident": sum(task.resident.values())} | task.temporary for task in run.tasks]
    shown, unit = [part for part in _PARTS if any(parts.get(part) for parts in sizes)], _unit(run)[1]
    rows = [["task", "peak", "", *shown]]
    for task, parts in zip(run.tasks, sizes, strict=True):
        fits = "" if task.peak <= run.cluster.usable else "does not fit"
        rows.append([task.task.name, _number(task.peak / unit), fits,
                     *(_number(parts.get(part, 0.0) / unit) for part in shown)])
    return rows


def _time_rows(run: RunEstimate) -> list[list[str]]:
    axes = [axis for axis in ("pipeline", "data", "slices", "fsdp", "context", "tensor")
            if any(task.work.sent.get(axis) for task in run.tasks)]
    unit, size = _unit_of(max((sent for task in run.tasks for sent in task.work.sent.values()), default=GB))
    launched = any(task.launch for task in run.tasks)
    rows = [["task", "seconds", "bound by", "compute", "memory", "network", *["launch"] * launched, "TFLOP",
             *(f"{unit} over {axis}" for axis in axes), "tokens/s", "calls", "hours"]]
    for task in run.tasks:
        calls = task.task.calls
        rows.append([
            task.task.name, _short(task.seconds), task.bound, _short(task.compute), _short(task.memory), _short(task.network),
            *[_short(task.launch)] * launched, _short(task.work.flops / 1e12),
            *(_number(task.work.sent.get(axis, 0.0) / size) for axis in axes),
            f"{task.tokens_per_second:,.0f}", "?" if calls is None else f"{calls:,}",
            "?" if calls is None else _short(task.seconds * calls / 3600),
        ])
    return rows


def _totals(run: RunEstimate, prices: DevicePrices | None) -> list[str]:
    hours = run.seconds / 3600
    lines = [f"Total: {hours:.3g} hours, {hours * sum(each.devices for each in run.clusters):.3g} device hours."]
    if run.uncounted:
        lines.append(f"Not counted: {', '.join(run.uncounted)}; their steps depend on the data. Set --examples=N to its "
                     "number of rows.")
    planned = {task.task.stage for task in run.tasks} | {stage.stage for stage in run.placed}
    skipped = [record.name for record in stages_in_order(run.config.stages)
               if record.name not in planned and record.programs]
    if skipped:
        lines.append(f"Not planned: {', '.join(skipped)}.")
    if prices is not None:
        cost = money(run, prices)
        rates = {each.chip.name: f"{prices.hourly.get(each.chip.name, 0):g}" for each in run.clusters}
        shown = [rate if len(rates) == 1 else f"{rate} ({name})" for name, rate in rates.items()]
        lines.append(
            f"{cost:,.2f} {prices.currency}, at {' and '.join(shown)} per device hour on {prices.date}."
            if cost is not None else f"The prices of {prices.date} do not include "
            f"{next(each.chip.name for each in run.clusters if each.chip.name not in prices.hourly)}."
        )
    return lines


def money(run: RunEstimate, prices: DevicePrices) -> float | None:
    """The cost of the counted tasks on all devices; None if a chip has no price."""
    if any(each.chip.name not in prices.hourly for each in run.clusters):
        return None
    return run.seconds / 3600 * sum(each.devices * prices.hourly[each.chip.name] for each in run.clusters)


def to_json(
    run: RunEstimate, weights: dict[str, WeightBytes], assumptions: Assumptions, prices: DevicePrices | None
) -> dict[str, Any]:
    """The plan as JSON: bytes, seconds and FLOPs per device, unrounded."""
    cluster = run.cluster
    return {
        "cluster": {"name": cluster.name, "devices": cluster.devices, "hosts": cluster.hosts, "usable_bytes": cluster.usable,
                    "source": cluster.chip.source},
        "mesh": to_dict(run.config)["mesh"],
        "assumptions": dataclasses.asdict(assumptions),
        "weights": {role: dataclasses.asdict(own) for role, own in weights.items()},
        "tasks": [_task_json(task) for task in run.tasks],
        "placed": _placed_json(run.placed),
        "fits": run.fits,
        "peak_bytes": run.peak,
        "seconds": run.seconds,
        "uncounted": list(run.uncounted),
        "money": None if prices is None else {"amount": money(run, prices), "currency": prices.currency, "date": prices.date},
    }


def _task_json(task: TaskEstimate) -> dict[str, Any]:
    own = task.task
    return {
        "stage": own.stage, "phase": own.phase, "roles": list(own.runs), "trained": list(own.trains), "rows": own.rows.rows,
        "length": own.rows.length, "new_tokens": own.rows.new, "calls": own.calls, "peak_bytes": task.peak,
        "resident_bytes": task.resident, "temporary_bytes": task.temporary, "flops": task.work.flops,
        "hbm_bytes": task.work.hbm, "sent_bytes": task.work.sent, "seconds": task.seconds, "compute_seconds": task.compute,
        "memory_seconds": task.memory, "network_seconds": task.network, "launch_seconds": task.launch, "bound": task.bound,
        "tokens_per_second": task.tokens_per_second,
    }


def _placed_lines(stages: Sequence[PlacedStage]) -> list[str]:
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


def _placed_json(stages: Sequence[PlacedStage]) -> list[dict[str, Any]]:
    """The figures of `_placed_lines`, unrounded."""
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
