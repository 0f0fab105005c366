"""Reports placements of stage ppo, on one machine and on machines of unlike kinds, as text and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from jaxalign.planner.hardware import Cluster
from jaxalign.planner.placement_choices import Choice, Choices, joined
from jaxalign.planner.placement_kinds import KindChoices
from jaxalign.planner.placement_schedules import FLAT, INTERLEAVE
from jaxalign.planner.placement_search import SYNCHRONOUS, Found
from jaxalign.planner.prices import DevicePrices
from jaxalign.planner.role_models import PHASES, SCORING
from jaxalign.tracking.table import ruled

GB = 1e9
_TITLES = {FLAT: "together", SYNCHRONOUS: "sets"}
"""The titles of schedules with another title than their name."""


def lines(choices: Choices | None, cluster: Cluster, prices: DevicePrices | None) -> list[str]:
    """The section "Placements" of a plan; empty without choices."""
    if choices is None:
        return []
    if choices.refused:
        return ["", f"Placements of stage ppo: {choices.refused}."]
    rows, price = choices.workload, _hourly(cluster, prices)
    titles = ["", "schedule", *PHASES, "moves", "seconds", "idle", "peak GB", *([prices.currency] if price is not None else [])]
    table = [titles]
    for number, choice in enumerate(choices.best, 1):
        found = choice.found
        cost = [f"{found.seconds / 3600 * price:.3g}"] if price is not None else []
        seconds = [f"{value:.3g}" for value in (*(found.phases[phase] for phase in PHASES), found.moved, found.seconds)]
        table.append([f"{number}", title(found), *seconds, f"{choice.idle:.0%}",
                      f"{choice.peak / GB:.1f}", *cost])
    text = ["", f"Placements of stage ppo: an iteration of {rows.batch} responses, {rows.prompt} prompt tokens and {rows.new} "
            f"new tokens each, on {cluster.name}", *ruled(table)]
    for number, choice in enumerate(choices.best, 1):
        text += ["", f"{number}. {'; '.join(places(joined(choice.found.entries)))}"]
        text += [*(f"   - {reason}" for reason in reasons(choice)), flag_words(choice)]
    return [*text, "", *choices.notes]


def flag_words(choice: Choice) -> str:
    """The flags of a placement, one on each line."""
    return "   " + (" \\\n      ".join(map(shlex.quote, choice.flags)) or "No flag: this is the config as given.")


def title(found: Found) -> str:
    """The name of a placement's schedule."""
    return _TITLES.get(found.schedule, found.schedule)


def reasons(choice: Choice) -> list[str]:
    """Sentences that say where the time and the memory of a placement go."""
    found = choice.found
    if found.schedule != INTERLEAVE:
        return list(found.reasons)
    # Its sets share devices, so that a set's own seconds are not those of the phase.
    halves = [(one.role.role, one.variants[SCORING].seconds) for group in found.sets[1:] for one in group.members]
    scoring = (f"{SCORING} takes {found.phases[SCORING]:.3g} s; "
               f"{' and '.join(f'{role} ({seconds:.3g} s)' for role, seconds in halves)} run at the same time")
    others = [sentence for sentence in found.reasons if f" in {SCORING}" not in sentence]
    return [scoring if sentence.startswith(f"{SCORING} takes") else sentence for sentence in others]


def places(entries: Sequence[str]) -> list[str]:
    """The roles of joined entries with their devices and meshes, as in "policy and critic on devices 0-3 with fsdp=4"."""
    words = []
    for entry in entries:
        roles, _, where = entry.partition("=")
        devices, _, mesh = where.partition(":")
        noun = "devices" if "-" in devices else "device"
        words.append(f"{', '.join(roles.split('+'))} on {noun} {devices}" + (f" with {mesh}" if "-" in devices else ""))
    return words


def _hourly(cluster: Cluster, prices: DevicePrices | None) -> float | None:
    """The price of the whole machine for an hour, with devices that a placement leaves unused; None if it is unknown."""
    price = None if prices is None else prices.hourly.get(cluster.chip.name)
    return None if price is None else price * cluster.devices


def to_json(choices: Choices | None, cluster: Cluster, prices: DevicePrices | None) -> dict[str, Any] | None:
    """The placements as JSON: seconds and bytes, unrounded; None without choices."""
    if choices is None:
        return None
    price = _hourly(cluster, prices)
    return {
        "refused": choices.refused,
        "workload": None if choices.workload is None else dataclasses.asdict(choices.workload),
        "notes": list(choices.notes),
        "best": [{
            "schedule": choice.found.schedule,
            "seconds": choice.found.seconds,
            "phases": choice.found.phases,
            "moved_seconds": choice.found.moved,
            "idle": choice.idle,
            "peak_bytes": choice.peak,
            "cost": None if price is None else choice.found.seconds / 3600 * price,
            "unused": choice.found.unused,
            "roles": list(joined(choice.found.entries)),
            "reasons": reasons(choice),
            "flags": list(choice.flags),
        } for choice in choices.best],
    }


def kind_lines(choices: KindChoices | None, prices: DevicePrices | None) -> list[str]:
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


def kinds_to_json(choices: KindChoices | None) -> dict[str, Any] | None:
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
