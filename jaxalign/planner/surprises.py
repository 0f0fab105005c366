"""What a reader of a compiled program would want to be told: weights that travel at every token, arrays that are whole on
every device, work that the compiler does twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import NamedSharding

from jaxalign.planner.hlo import Collective

LARGE = 32 << 20
"""Bytes on a device from which an array is worth a sentence."""
DECODING = ("sampling", "reasoning", "decode")
_SHOWN = 3


def surprises(
    phase: str, found: Sequence[Collective], arrays: Iterable[tuple[str, tuple[int, ...], np.dtype, object]], large: int = LARGE
) -> tuple[str, ...]:
    """Sentences about one program.

    Args:
      phase: of the program; those of `DECODING` make one token after another.
      found: its collectives.
      arrays: (name, shape, dtype, sharding) of its arguments and results.
      large: bytes from which an array that is whole on every device is told.
    """
    told = []
    if phase in DECODING:
        # The loop over tokens is the one whose turns the program decides.
        each = [one for one in found if one.weight and (phase == "decode" or not one.certain)]
        if each:
            turns = max(one.times for one in each) if phase == "decode" else 1
            told.append(f"every token gathers weights from other devices: {_sizes(each, turns)}; keep them whole on a device, "
                        "or split over tensor alone, while sampling")
    again = [one for one in found if one.rematerialised and one.kind == "all-gather"]
    if again:
        told.append(f"the compiler gathers again, to save memory, what was gathered before: {_sizes(again)}; smaller "
                    "micro-batches leave it room to keep it")
    whole, devices = {}, 1
    for name, shape, dtype, sharding in arrays:
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or not sharding.is_fully_replicated:
            continue
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size >= large:
            whole[f"{name} {list(shape)}"], devices = size, sharding.mesh.size
    if whole:
        told.append(f"whole on each of the {devices} devices: {_listed(whole)}, {sum(whole.values()) / 1e9:.2f} GB")
    return tuple(told)


def _listed(sizes: dict[str, float]) -> str:
    """The largest by name, and how many more."""
    names = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _sizes(found: Sequence[Collective], turns: int = 1) -> str:
    totals: dict[str, float] = {}
    for one in found:
        name = one.weight or one.op_name or one.name
        totals[name] = totals.get(name, 0.0) + one.result * (one.times if turns > 1 else 1)
    return f"{len(found)} all-gathers, {sum(totals.values()) / 1e6:.1f} MB ({_listed(totals)})"
