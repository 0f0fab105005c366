"""Arrays that a compiled program should not store: float32 copies of bfloat16 weights, copies of weights in a loop, and the
logits of all tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from jaxalign.planner.hlo import MOVES, argument
from jaxalign.planner.hlo_text import Computation, Instruction, Module

_SMALL = 1 << 20
"""Copies below this many bytes, as those of a layer's norms, are left out."""
_UNCOPIED = ("get-tuple-element", "bitcast", "all-gather-start", "all-gather", "copy-start")
"""Instructions that refer to an array without copying it, gather it, or start a copy that is counted at its end."""
_ON_CHIP = re.compile(r"S\(\d+\)")
"""The mark of an array in a memory of the chip's own, such as a TPU's VMEM."""
_FLOATS = re.compile(r"\b(f32|bf16|f16)\[([\d,]+)\]")


def float32_copies(module: Module) -> dict[str, int]:
    """Bytes on a device, by program argument, of each bfloat16 argument that the program stores in float32, whole or in part.

    A conversion inside a fused computation, as before a matrix product, is not stored. Of several copies of an argument, the
    largest counts, without the arrays that it is concatenated with.
    """
    halves = {(one.op_name or one.name).removeprefix("arguments.") for one in module.entry.parameters.values()
              if one.type.startswith("bf16[")}
    found: dict[str, int] = {}
    for computation, instruction in _stored(module):
        for home, one in _results(module, computation, instruction):
            if one.type.startswith("f32[") and one.bytes >= _SMALL:
                for part in _parts(home, one):
                    source = argument(module, home, part.name)
                    if source in halves:
                        sizes = _FLOATS.search(part.type)[2].split(",")
                        found[source] = max(4 * math.prod(int(size) for size in sizes), found.get(source, 0))
    return found


def copied_in_loops(module: Module) -> dict[str, int]:
    """Bytes on a device, by program argument, that the loops of a program copy of it without computing: slices of stacked
    layers, and concatenations. A loop whose iterations are not known, such as that of decoding steps, counts once.

    A slice inside a fused computation, as of a matrix product, is not stored. Arrays below 1 MiB are left out, and those that
    are prefetched into a memory of the chip's own.
    """
    found: dict[str, int] = {}
    for computation, instruction in _stored(module):
        if instruction.opcode in _UNCOPIED or not module.loops(computation):
            continue
        times, _ = module.times(computation)
        for home, one in _results(module, computation, instruction):
            for part in _parts(home, one):
                source = argument(module, home, part.name)
                if source and part.bytes >= _SMALL and not _ON_CHIP.search(instruction.type):
                    found[source] = found.get(source, 0) + times * part.bytes
    return found


def whole_logits(module: Module, vocabulary: int, tokens: int, hidden: int) -> list[str]:
    """The types of stored floating-point arrays that have a logit of every token.

    Args:
      module: the program.
      vocabulary: the columns of the unembedding on one device.
      tokens: the tokens on one device in a micro-batch.
      hidden: the size of a hidden state; arrays of this size, such as the unembedding, are left out.
    """
    found = set()
    for _, instruction in _stored(module):
        for kind, sizes in _FLOATS.findall(instruction.type):
            shape = [int(size) for size in sizes.split(",")]
            if vocabulary in shape and hidden not in shape and math.prod(shape) // vocabulary >= tokens:
                found.add(f"{kind}[{sizes}]")
    return sorted(found)


def _stored(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    """Each instruction whose result is in the device's memory: those outside of fused computations and reductions."""
    for computation in module.computations.values():
        called = module.callers.get(computation.name, [])
        if computation.entry or any(call.opcode != "fusion" for _, call, _ in called):
            yield from ((computation, instruction) for instruction in computation.instructions.values())


def _parts(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """The arrays that an instruction concatenates, as the compiler does with weights that multiply the same rows; or the
    instruction itself."""
    moved = instruction
    while moved.opcode in MOVES:
        moved = computation.instructions[moved.operands[0]]
    if moved.opcode != "concatenate":
        yield instruction
        return
    for name in moved.operands:
        yield from _parts(computation, computation.instructions[name])


def _results(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions that compute what an instruction stores: those of the fused computation, if it calls one."""
    if instruction.opcode != "fusion":
        yield computation, instruction
        return
    fused = module.computations[instruction.calls("calls")]
    names = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    yield from ((fused, fused.instructions[name]) for name in names)
