"""Counts the FLOPs of a compiled program from its text: every matrix product, times the number of times it runs.

The compiler's cost analysis counts the body of a loop once; here a product in a loop over layers counts once per layer. Only
matrix products count (the TPU compiler writes them as convolutions); elementwise work is at most 1% of a training step. The
text does not show the inside of kernels, so the products of fused attention are not counted.
"""

from __future__ import annotations

import functools
import math
import re

from jaxalign.planner.hlo_text import Computation, Instruction, Module

_SIZES = re.compile(r"\[([\d,]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def flops(module: Module, unknown_trips: int = 1) -> int:
    """FLOPs of one device in one run of the program. A loop with a data-dependent number of iterations counts `unknown_trips`
    times; a branch counts as always taken."""

    @functools.cache
    def runs(name: str) -> int:
        """Executions of a computation, summed over its callers."""
        if module.computations[name].entry:
            return 1
        total = 0
        for home, call, _ in module.callers.get(name, ()):
            trips = module.trips(call) if call.opcode == "while" else 1
            total += runs(home.name) * (unknown_trips if trips is None else trips)
        return total

    return sum(runs(one.name) * _own(one) for one in module.computations.values())


def _own(computation: Computation) -> int:
    """FLOPs of one run of a computation, excluding the computations that it calls."""
    total = 0
    for instruction in computation.instructions.values():
        if instruction.opcode == "dot":
            left = _integers(_SIZES, computation.instructions[instruction.operands[0]].type)
            contracted = math.prod(left[axis] for axis in _integers(_CONTRACTED, instruction.attributes))
            total += 2 * math.prod(_integers(_SIZES, instruction.type)) * contracted
        elif instruction.opcode == "convolution":
            total += _convolution(computation, instruction)
    return total


def _convolution(where: Computation, instruction: Instruction) -> int:
    """Two FLOPs for each pair of numbers that is multiplied; padding and the holes of dilation do not count.

    XLA writes a batched matrix product as a convolution in which each window position meets a single input number.
    """
    left, right = (_integers(_SIZES, where.instructions[name].type) for name in instruction.operands[:2])
    out = _integers(_SIZES, instruction.type)
    labels = _LABELS.search(instruction.attributes)
    axes = {letter: (labels[1].index(letter), labels[2].index(letter), labels[3].index(letter))
            for letter in labels[1] if letter.isdigit()}
    window = {}
    for name in ("stride", "pad", "lhs_dilate", "rhs_dilate"):
        match = re.search(r"window=\{[^}]*\b" + name + r"=([\-\dx_]+)", instruction.attributes)
        window[name] = match[1].split("x") if match else []
    meets = 1
    for letter, (a, b, c) in axes.items():
        chosen = {name: values[int(letter)] for name, values in window.items() if values}
        meets *= _pairs(left[a], right[b], out[c], **chosen)
    batch, features = out[labels[3].index("b")], out[labels[3].index("f")]
    return 2 * meets * batch * features * right[labels[2].index("i")]


def _pairs(size: int, kernel: int, out: int, stride="1", pad="0_0", lhs_dilate="1", rhs_dilate="1") -> int:
    """The number of pairs (output position, window position) that meet an input number rather than padding, along one axis."""
    step, before, holes, apart = int(stride), int(pad.split("_")[0]), int(lhs_dilate), int(rhs_dilate)
    last, pairs = (size - 1) * holes, 0
    for k in range(kernel):
        first = k * apart - before
        # Output positions i for which first + i * step is in [0, last] and a multiple of holes.
        low, high = max(0, -(first // step)), min(out - 1, (last - first) // step)
        period = holes // math.gcd(holes, step)
        hit = next((i for i in range(low, low + period) if (first + i * step) % holes == 0), None)
        pairs += 0 if hit is None or hit > high else (high - hit) // period + 1
    return pairs


def _integers(pattern: re.Pattern, text: str) -> tuple[int, ...]:
    """The comma-separated integers of the group of the pattern's first match."""
    return tuple(int(x) for x in pattern.search(text)[1].split(",") if x)
