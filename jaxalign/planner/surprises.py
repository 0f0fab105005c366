"""Warnings about a compiled program: weights gathered or copied for every token, arrays replicated on every device, collectives
that the compiler repeats, weights stored again in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding

from jaxalign.planner.hlo import Collective

LARGE = 32 << 20
"""Replicated arrays of at least this many bytes are reported."""
DECODING = ("sampling", "reasoning", "decode")
_SHOWN = 3


def surprises(
    phase: str, collectives: Sequence[Collective], arrays: Iterable[tuple[str, tuple[int, ...], np.dtype, object]],
    copies: Mapping[str, int], copied: Mapping[str, int], large: int = LARGE,
) -> tuple[str, ...]:
    """The warnings about one program, as sentences.

    Args:
      phase: the program's phase; the phases in `DECODING` sample token by token.
      collectives: the program's collectives.
      arrays: (name, shape, dtype, sharding) of its arguments and results.
      copies: bytes of each bfloat16 argument that it stores in float32 (`stored_arrays.float32_copies`).
      copied: bytes of each argument that its loops copy (`stored_arrays.copied_in_loops`), if that is a large part of them.
      large: the minimum size in bytes of a replicated array that is reported.
    """
    warnings = []
    if phase in DECODING:
        # The loop over tokens is the only loop with a data-dependent number of iterations.
        each = [one for one in collectives if one.weight and (phase == "decode" or not one.certain)]
        if each:
            turns = max(one.times for one in each) if phase == "decode" else 1
            warnings.append(f"every token gathers weights from other devices: {_sizes(each, turns)}; while sampling, replicate "
                            "them or split them only over tensor")
        if copied:
            size = f"{sum(copied.values()) / 1e9:.2f} GB"
            warnings.append(f"every token copies {size} of weights before it multiplies them: {_listed(copied)}; on a GPU, "
                            "models of more than 48 layers do so")
    again = [one for one in collectives if one.rematerialised and one.kind == "all-gather"]
    if again:
        warnings.append(f"the compiler gathers weights a second time to save memory: {_sizes(again)}; use smaller "
                            "micro-batches to leave memory for them")
    if copies:
        size = f"{sum(copies.values()) / 1e9:.2f} GB"
        warnings.append(f"the program stores bfloat16 weights in float32: {_listed(copies)}, {size}; computing in bfloat16 "
                        "(model.compute_dtype) needs no copy")
    whole, devices = {}, 1
    for name, shape, dtype, sharding in arrays:
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or not sharding.is_fully_replicated:
            continue
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size >= large:
            whole[f"{name} {list(shape)}"], devices = size, sharding.mesh.size
    if whole:
        warnings.append(f"replicated on all {devices} devices: {_listed(whole)}, {sum(whole.values()) / 1e9:.2f} GB")
    return tuple(warnings)


def _listed(sizes: Mapping[str, float]) -> str:
    """The names of the largest arrays, and the number of the others."""
    names = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _sizes(gathers: Sequence[Collective], turns: int = 1) -> str:
    totals: dict[str, float] = {}
    for one in gathers:
        name = one.weight or one.op_name or one.name
        totals[name] = totals.get(name, 0.0) + one.result * (one.times if turns > 1 else 1)
    return f"{len(gathers)} all-gathers, {sum(totals.values()) / 1e6:.1f} MB ({_listed(totals)})"
