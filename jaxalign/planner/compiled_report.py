"""Reports a run's compiled programs as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxalign.planner.compiled import CompiledProgram
from jaxalign.tracking.table import ruled

GB = 1e9


def sent(program: CompiledProgram) -> dict[str, float]:
    """Bytes that a device sends, by mesh axes: "fsdp", "data+fsdp", or "" for groups that do not follow mesh axes."""
    sizes: dict[str, float] = {}
    for one in program.collectives or ():
        axes = "+".join(one.axes)
        sizes[axes] = sizes.get(axes, 0.0) + one.total
    return sizes


def hidden(program: CompiledProgram) -> dict[str, float]:
    """The part of `sent` during which the device computes: of collectives that overlap a matrix product or attention."""
    overlapping = dataclasses.replace(program, collectives=tuple(one for one in program.collectives or () if one.overlapped))
    return sent(overlapping)


def verdict(program: CompiledProgram) -> str:
    """One line on a compiled program, such as "ppo update (policy): 47.30 of 78.27 GB, fits, 12 s"."""
    name = program.name if program.devices else f"{program.name} ({program.role})"
    if program.memory is None:
        return f"{name}: rejected by the compiler, {program.seconds:.0f} s"
    memory = f"{program.total / GB:.2f}" + ("" if program.usable is None else f" of {program.usable / GB:.2f}")
    return f"{name}: {memory} GB, {'fits' if program.fits else 'does not fit'}, {program.seconds:.0f} s"


def text(programs: Sequence[CompiledProgram]) -> str:
    """A table with a row for each program, then the bytes sent, the warnings and the compiler's errors."""
    rows = [["compiled", "peak", "", "temporary", "resident", "collectives", "GB sent", "seconds to compile"]]
    for program in programs:
        name, resident = program.name, f"{sum(program.resident.values()) / GB:.2f}"
        if program.memory is None:
            rows.append([name, "-", "rejected", "-", resident, "-", "-", f"{program.seconds:.0f}"])
            continue
        known = program.collectives is not None
        rows.append([
            name, f"{program.total / GB:.2f}", "" if program.fits else "does not fit", f"{program.memory.temporary / GB:.2f}",
            resident, str(len(program.collectives)) if known else "?",
            f"{sum(sent(program).values()) / GB:.2f}" if known else "?", f"{program.seconds:.0f}",
        ])
    lines = ["Memory reported by the compiler, GB on each device", *ruled(rows)]
    for program in programs:
        overlapping = hidden(program)
        over = ", ".join(f"{axes or 'no axis'} {size / GB:.2f} GB ({overlapping.get(axes, 0.0) / GB:.2f} during computation)"
                         for axes, size in sorted(sent(program).items()))
        lines += [f"{program.name}: each device sends over {over}."] if over else []
        calls = ", ".join(f"{kernel} {count}" for kernel, count in (program.kernels or {}).items())
        lines += [f"{program.name}: kernels and their calls: {calls}."] if calls else []
        lines += [f"{program.name}: {warning}." for warning in program.warnings]
        if program.refusal:
            lines += [f"The compiler rejected {program.name}:", *program.refusal.splitlines()]
    return "\n".join(lines)


def to_json(programs: Sequence[CompiledProgram]) -> list[dict[str, Any]]:
    """Bytes and FLOPs per device, unrounded."""
    return [
        {
            "stage": program.stage, "phase": program.phase, "role": program.role, "devices": program.devices,
            "fits": program.fits, "peak_bytes": program.total,
            "memory_bytes": None if program.memory is None else dataclasses.asdict(program.memory),
            "resident_bytes": program.resident, "flops": program.flops, "bytes_accessed": program.bytes_accessed,
            "product_flops": program.products,
            "sent_bytes": None if program.collectives is None else sent(program),
            "overlapped_bytes": None if program.collectives is None else hidden(program),
            "kernels": program.kernels, "warnings": list(program.warnings),
            "refusal": program.refusal, "compile_seconds": program.seconds,
        }
        for program in programs
    ]
