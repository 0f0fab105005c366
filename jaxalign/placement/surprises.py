"""What a reader of a compiled program would want to be told: weights that travel at every token, arrays that are whole on
every device, work that the compiler does twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import NamedSharding

from jaxalign.placement.hlo import Collective

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
    for name, shape, dtype, sharding in arrays:
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or not sharding.is_fully_replicated:
            continue
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size >= large:
            told.append(f"{name} {list(shape)}, {size / 1e9:.2f} GB, is whole on each of the {sharding.mesh.size} devices")
    return tuple(told)


def _sizes(found: Sequence[Collective], turns: int = 1) -> str:
    names = [one.weight or one.op_name or one.name for one in sorted(found, key=lambda one: -one.total)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    total = sum(one.result * (one.times if turns > 1 else 1) for one in found)
    return f"{len(found)} all-gathers, {total / 1e6:.1f} MB ({', '.join(names[:_SHOWN])}{more})"
