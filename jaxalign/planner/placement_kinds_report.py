"""Reports placements on machines of unlike kinds as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxalign.planner.placement_choices import joined
from jaxalign.planner.placement_kinds import KindChoices
from jaxalign.planner.placement_report import GB, flag_words, places, title
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.role_models import PHASES
from jaxalign.tracking.table import ruled


def lines(choices: KindChoices | None, prices: DevicePrices | None) -> list[str]:
    """The section "Placements" of a plan for unlike machines; empty without choices."""
    if choices is None:
        return []
    refused = [f"Placements of stage ppo: {sentence}." for sentence in choices.refused]
    if not choices.listed:
        return ["", *refused]
    rows = choices.workload
    currency = [prices.currency] if prices else []
    table = [["", "schedule", "machines", *PHASES, "moves", "seconds", "idle", "peak GB", *currency, "one program"]]
    for number, one in enumerate(choices.listed, 1):
        found = one.found
        seconds = [f"{value:.3g}" for value in (*(found.phases[phase] for phase in PHASES), found.moved, found.seconds)]
        peak = max(group.peak for group in found.sets)
        table.append([f"{number}", title(found), " + ".join(one.machines), *seconds, f"{one.idle:.0%}", f"{peak / GB:.1f}",
                      *([f"{one.cost:.3g}"] if prices else []), "yes" if one.one_program else "no"])
    priced = ", priced for the devices in use" if prices else ""
    text = ["", f"Placements of stage ppo on machines of unlike kinds: an iteration of {rows.batch} responses, {rows.prompt} "
            f"prompt tokens and {rows.new} new tokens each{priced}", *ruled(table)]
    for number, one in enumerate(choices.listed, 1):
        text += ["", f"{number}. {'; '.join(places(joined(one.found.entries)))}"]
        text += [f"   - {group.count} {group.chip.name} with {', '.join(member.role.role for member in group.members)}: "
                 f"{group.peak / GB:.1f} of {group.usable / GB:.1f} GB on a device" for group in one.found.sets]
        if one.choice is None:
            text.append(f"   It needs several worlds, one on each of {' and '.join(one.machines)}, and cannot be run by one "
                        "program: a placement needs one process, whose devices are of one kind.")
        else:
            text.append(flag_words(one.choice))
            text.append(f"   Devices of the flags are numbered on {one.machines[0]}.")
    if choices.fastest_program is None:
        program = "One program can run none of them."
    else:
        number = 1 + choices.listed.index(choices.fastest_program)
        program = "One program can run it." if number == 1 else f"Fastest that one program can run: {number}."
    best = [f"Fastest: 1. {program}"]
    best += [f"Cheapest: {1 + choices.listed.index(choices.cheapest)}."] if prices else []
    return [*text, "", *best, *refused, *choices.notes]


def to_json(choices: KindChoices | None) -> dict[str, Any] | None:
    """The placements as JSON: seconds, bytes and prices, unrounded; None without choices."""
    if choices is None:
        return None
    return {
        "refused": list(choices.refused), "notes": list(choices.notes),
        "workload": None if choices.workload is None else dataclasses.asdict(choices.workload),
        "listed": [{
            "schedule": one.found.schedule, "machines": list(one.machines), "one_program": one.one_program,
            "seconds": one.found.seconds, "phases": one.found.phases, "moved_seconds": one.found.moved, "idle": one.idle,
            "cost": one.cost, "roles": list(joined(one.found.entries)),
            "groups": [{"devices": str(part), "chip": group.chip.name, "peak_bytes": group.peak, "usable_bytes": group.usable}
                       for part, group in zip(one.found.slices, one.found.sets, strict=True)],
            "flags": None if one.choice is None else list(one.choice.flags),
        } for one in choices.listed],
    }
