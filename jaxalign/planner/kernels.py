"""The kernels that a compiled program calls, and the computation that runs while its collectives are under way."""

from __future__ import annotations

import itertools
import re

from jaxalign.planner.hlo_text import Computation, Instruction, Module

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRITON = re.compile(r'"kind":"__triton(\w*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")


def kernels(module: Module, unknown_trips: int = 1) -> dict[str, int]:
    """Executions by kernel in one run of the program: "cuDNN attention", "cuDNN", "cuBLAS", "Triton product", "Triton",
    "splash attention" and "Pallas". A loop with a data-dependent number of iterations counts `unknown_trips` times."""
    counts: dict[str, int] = {}
    for computation in module.computations.values():
        if not computation.entry and computation.name not in module.callers:
            continue
        for instruction in computation.instructions.values():
            kernel = kernel_of(instruction)
            if kernel:
                counts[kernel] = counts.get(kernel, 0) + module.times(computation, unknown_trips)[0]
    return dict(sorted(counts.items()))


def kernel_of(instruction: Instruction) -> str | None:
    """The name of the kernel that an instruction calls, as in `kernels`; None for the compiler's own code."""
    if instruction.opcode == "fusion":
        triton = _TRITON.search(instruction.attributes)
        return None if triton is None else "Triton product" if "gemm" in triton[1] else "Triton"
    target = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    if target is None:
        return None
    if target[1] == "tpu_custom_call":
        return "splash attention" if "splash" in instruction.attributes + instruction.name else "Pallas"
    for prefix, kernel in (("__cudnn$fmha", "cuDNN attention"), ("__cudnn$", "cuDNN"), ("__cublas$", "cuBLAS"),
                           ("__gpu$xla.gpu.triton", "Triton")):
        if target[1].startswith(prefix):
            return kernel
    return None


def overlapped(module: Module, computation: Computation, start: Instruction) -> bool:
    """Whether a matrix product or attention runs between the start and the end of a collective, in the order of the schedule.

    Args:
      module: the program.
      computation: the computation of the collective.
      start: the collective: its start, such as all-gather-start, or the whole collective in a computation that an asynchronous
        call starts. Any other collective is synchronous and overlaps nothing.
    """
    callers, channel = module.callers.get(computation.name, []), _CHANNEL.search(start.attributes)
    target = _TARGET.search(computation.root.attributes)
    fused = target is not None and target[1] == "AsyncCollectiveStart"  # The form of the TPU compiler.
    if callers and (fused or callers[0][1].opcode == "async-start"):
        computation, start, _ = callers[0]
    elif not start.opcode.endswith("-start"):
        return False

    def ends(instruction: Instruction) -> bool:
        if instruction.opcode == "fusion":
            called = module.computations[instruction.calls("calls")]
            if not fused or "AsyncCollectiveDone" not in called.root.attributes:
                return False
            # Whether it ends the collective with this channel.
            channels = [match[1] for one in called.instructions.values() if (match := _CHANNEL.search(one.attributes))]
            return channel is not None and channel[1] in channels
        return instruction.opcode.endswith("-done") and start.name in instruction.operands

    place = list(computation.instructions).index(start.name)
    for instruction in itertools.islice(computation.instructions.values(), place + 1, None):
        if ends(instruction):
            return False
        if _computes(module, instruction):
            return True
    return False


def _computes(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or attention, or calls a computation that has one."""
    if instruction.opcode in ("dot", "convolution"):
        return True
    if kernel_of(instruction) not in (None, "Triton"):
        return True
    called = (module.computations[name] for kind, name in instruction.called if kind != "to_apply")
    return any(_computes(module, one) for computation in called for one in computation.instructions.values())
