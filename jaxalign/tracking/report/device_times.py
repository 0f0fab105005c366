"""The sections on when each group of devices ran which program, for stages whose roles have devices of their own."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from jaxalign.tracking.device_times import IterationTimes, busy_seconds, seconds_without_programs
from jaxalign.tracking.formatting import capitalized, percent
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import LAST, Figure, ReportSection, Table
from jaxalign.tracking.report.plots import Lane
from jaxalign.tracking.workdir import RunFiles

_SHOWN = 3
"""The number of iterations in the timeline."""
_NOTABLE = 0.05
"""The least share of the time that a sentence mentions."""

Shares = Mapping[str, Mapping[str, float]]
"""The share of the time of each program, by group of devices and name."""


def device_times(run: RunFiles) -> list[ReportSection]:
    """A section for each stage that recorded its programs (`tracking.device_times`); none if all roles share their devices."""
    recorded = {label: stage for label, stage in {**run.stages, **run.runs}.items() if stage.device_times}
    return [_section(run, label, stage.device_times, len(recorded) > 1) for label, stage in recorded.items()]


def _section(run: RunFiles, label: str, rows: Sequence[IterationTimes], several: bool) -> ReportSection:
    words = label.replace(",", "").split()
    anchor, title = "-".join(["devices", *words]), f"Programs by device, stage {label}"
    nav = f"Devices, {label}" if several else "Devices"
    # After a resume under another placement, only the newest placement is shown.
    rows = [row for row in rows if not row.first and row.groups == rows[-1].groups]
    if not rows:
        reason = f"Stage {label} has recorded no iteration yet except its first, which waits for the compiler."
        return ReportSection(anchor, title, missing=(reason,), nav=nav, order=LAST)
    groups, total = rows[-1].groups, sum(row.seconds for row in rows)
    shares = {group: {name: spent / total for name, spent in busy_seconds(rows, group).items()} for group in groups}
    names = tuple(dict.fromkeys(program.name for row in rows for program in row.programs))
    idlest = max(shares, key=lambda group: _idle(shares[group]))
    most = ", the largest share of all groups" if len(groups) > 1 else ""
    devices, idle = _devices(idlest, f"({', '.join(groups[idlest])}) "), percent(_idle(shares[idlest]))
    intro = [capitalized(f"{devices} idle for {idle} of the time{most}."), *_advice(run, words[0], groups, shares)]
    unused = sum(map(seconds_without_programs, rows)) / total
    if unused >= _NOTABLE:
        intro.append(f"For {percent(unused)} of the time no device ran one of these programs: the host prepared batches or "
                     "computed rewards, or checks ran.")
    cells = [[f"{group}: {', '.join(groups[group])}", percent(_idle(busy)), *(percent(busy.get(name)) for name in names)]
             for group, busy in shares.items()]
    counted = f"{len(rows):,} iterations" if len(rows) > 1 else "1 iteration"
    table = Table(f"Share of the time of {counted}, without the first. The time between iterations, for metrics and "
                  "checkpoints, is not counted.", ["Devices", "Idle", *names], cells)
    return ReportSection(anchor, title, " ".join(intro), (), (_timeline(rows, names),), (table,), nav=nav, order=LAST)


def _devices(group: str, roles: str = "") -> str:
    """The subject of a sentence and its verb: "device 1 was" or "devices 0-3 were"."""
    return f"device {group} {roles}was" if group.isdecimal() else f"devices {group} {roles}were"


def _idle(busy: Mapping[str, float]) -> float:
    return max(0.0, 1.0 - sum(busy.values()))


def _timeline(rows: Sequence[IterationTimes], names: Sequence[str]) -> Figure:
    """The timeline of consecutive iterations whose durations are closest to the median."""
    shown = typical(rows)
    *offsets, end = itertools.accumulate((row.seconds for row in shown), initial=0.0)
    lanes = [Lane(f"Device{'' if group.isdecimal() else 's'} {group}: {', '.join(shown[0].groups[group])}", [
        (program.name, at + program.start, at + program.end)
        for at, row in zip(offsets, shown, strict=True) for program in row.on(group)
    ]) for group in shown[0].groups]
    marks = [(at, f"iteration {row.iteration}") for at, row in zip(offsets, shown, strict=True)]
    title = "Programs of one iteration" if len(shown) == 1 else f"Programs of {len(shown)} typical iterations"
    drawn = plots.timeline(title, lanes, names, marks, end)
    return Figure(title, Markup(drawn), "Grey: idle. Sampling counts from its first program to its last.", tuple(names), True)


def typical(rows: Sequence[IterationTimes]) -> list[IterationTimes]:
    """At most 3 rows of consecutive iterations, those whose durations differ least from the median of all rows."""
    median = statistics.median(row.seconds for row in rows)
    for count in range(min(_SHOWN, len(rows)), 0, -1):
        windows = [rows[begin : begin + count] for begin in range(len(rows) - count + 1)]
        windows = [window for window in windows if window[-1].iteration - window[0].iteration == count - 1]
        if windows:
            return list(min(windows, key=lambda window: sum(abs(row.seconds - median) for row in window)))
    return []


def _advice(run: RunFiles, stage: str, groups: Mapping[str, Sequence[str]], shares: Shares) -> list[str]:
    """A sentence on a setting that would reduce the largest idle share, if the measured times show one."""
    most = max(shares, key=lambda group: _idle(shares[group]))
    saved = _saved_by_sampling_ahead(groups, shares)
    section, reward = (run.config.get(name) or {} for name in ("ppo", "reward"))
    checks = section.get("checks") or {}
    allowed = all(checks.get(name, "warn") == "warn" for name in ("ratio", "sampler_gap"))
    allowed &= not section.get("sample_ahead") and not reward.get("while_sampling") and section.get("advantages") != "remax"
    if stage == "ppo" and allowed and saved >= _NOTABLE:
        return ["With ppo.sample_ahead=True, responses would be sampled during the update, which saves at most "
                f"{percent(saved)} of the time; each rollout then comes from weights that are one update old."]
    busiest = min(shares, key=lambda group: _idle(shares[group]))
    busy, apart = 1 - _idle(shares[busiest]), set(groups[most]).isdisjoint(groups[busiest])
    if apart and busy >= 0.5 and _idle(shares[most]) >= 0.5:
        return [f"Meanwhile, {_devices(busiest)} busy for {percent(busy)} of the time: give the roles there more devices, or "
                "let all roles share devices (config.placement)."]
    return []


def _saved_by_sampling_ahead(groups: Mapping[str, Sequence[str]], shares: Shares) -> float:
    """The share of the time for which sampling could overlap with other programs; 0 if its devices also train."""
    sampling = [group for group, busy in shares.items() if "generate" in busy]
    updates = {group: sum(spent for name, spent in busy.items() if name.endswith("update")) for group, busy in shares.items()}
    if not sampling or any(updates[group] for group in sampling):
        return 0.0
    generate = max(shares[group]["generate"] for group in sampling)
    alone = all(tuple(groups[group]) == ("generator",) for group in sampling)
    return min(generate, 1 - generate if alone else max(updates.values()))
