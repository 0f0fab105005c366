"""Reports placements of stage ppo as text and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from jaxalign.planner.hardware import Cluster
from jaxalign.planner.placement_choices import Choice, Choices, joined
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
