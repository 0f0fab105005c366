"""The collectives of a compiled program: their bytes and the mesh axes that they run over."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from jaxalign.planner.hlo_text import Computation, Instruction, Module, tuple_parts, type_bytes
from jaxalign.planner.kernels import overlapped

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
         "collective-broadcast")
MOVES = ("copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "copy-start", "copy-done",
          "opt-barrier", "pad", "all-gather-start", "all-gather")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:\W*(?:device_ids=)?\(?" + _IOTA.pattern + r"\)?)?\s*\{([^}]*)\}")
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. All bytes are per device.

    Attributes:
      operand, result: bytes of its operand and its result.
      axes: the mesh axes that its groups run over; () if the groups do not follow mesh axes.
      group: the number of devices in a group.
      times: executions in one run of the program.
      certain: whether `times` is exact. If not, it assumes `unknown_trips` iterations of a data-dependent loop.
      loop: the number of loops around it.
      weight: the program argument that it gathers, such as "params['blocks']['mlp']['up']"; "" if it gathers no argument.
      op_name: the JAX operation that it belongs to.
      rematerialised: whether the compiler repeats it to save memory.
      overlapped: whether a matrix product or attention runs between its start and its end (`kernels.overlapped`).
      between_slices: whether it is the transfer between slices of a hierarchical collective, over the slower network.
    """

    kind: str
    name: str
    operand: int
    result: int
    axes: tuple[str, ...]
    group: int
    times: int
    certain: bool
    loop: int
    weight: str
    op_name: str
    rematerialised: bool
    between_slices: bool = False
    overlapped: bool = False

    @property
    def wire(self) -> float:
        """Bytes that a device sends around a ring in one execution: the whole array minus its own part; twice that for an
        all-reduce, which is a reduce-scatter followed by an all-gather."""
        others = (self.group - 1) / self.group
        if self.between_slices:  # These are transfers to the host.
            return float(self.operand)
        return {
            "all-gather": self.result * others, "all-reduce": 2 * self.operand * others,
            "reduce-scatter": self.operand * others, "all-to-all": self.operand * others,
        }.get(self.kind, float(self.operand))

    @property
    def total(self) -> float:
        """Bytes that a device sends in one run of the program, over all executions of the collective."""
        return self.wire * self.times


def collectives(
    module: Module, mesh: Mapping[str, int], unknown_trips: int = 1, gpu: bool = False
) -> tuple[Collective, ...]:
    """The collectives of a program that was compiled for a mesh with these axes (outermost first) and sizes.

    An asynchronous collective counts once. A loop with a data-dependent number of iterations counts `unknown_trips` times.

    gpu: whether the program is for GPUs. Their compiler copies a collective with its channel when it peels an iteration off a
    loop, and each copy is executed. That of TPUs writes one collective that it overlaps with other work several times.
    """
    by_channel: dict[object, Collective] = {}
    for computation in module.computations.values():
        if not computation.entry and computation.name not in module.callers:
            continue
        for instruction in computation.instructions.values():
            kind, apart = instruction.opcode.removesuffix("-start"), _BETWEEN.search(instruction.attributes)
            if instruction.opcode == "send" and apart:
                kind = apart[1].lower().replace("_", "-")
            elif kind not in KINDS:
                continue
            one = _collective(module, computation, instruction, kind, mesh, unknown_trips)
            channel = None if gpu else re.search(r"channel_id=(\d+)", instruction.attributes)
            key = int(channel[1]) if channel else (computation.name, one.name)
            other = by_channel.get(key, one)
            larger = one if one.total > other.total else other
            by_channel[key] = dataclasses.replace(larger, overlapped=one.overlapped or other.overlapped)
    return tuple(by_channel.values())


def _collective(module, computation: Computation, instruction: Instruction, kind: str, mesh, unknown: int) -> Collective:
    operand = sum(computation.instructions[name].bytes for name in instruction.operands)
    result = instruction.bytes
    if instruction.opcode.endswith("-start"):  # Its type is (operands, results), on TPUs followed by context words.
        result = operand
        if kind != "all-reduce" and len(parts := tuple_parts(instruction.type)) > 1:
            result = type_bytes(parts[1])
    elif kind == "all-reduce" and computation.root.opcode == "dynamic-slice":
        if computation.root.operands[0] == instruction.name:  # The TPU compiler's form of a reduce-scatter.
            kind, result = "reduce-scatter", computation.root.bytes
    between = instruction.opcode == "send"
    if between:  # Slices split only the axis data.
        result, axes, group = operand, ("data",), mesh["data"]
    else:
        axes, group = _axes(instruction.attributes, mesh)
    times, certain = module.times(computation, unknown)
    weight = argument(module, computation, instruction.operands[0]) if kind == "all-gather" else ""
    callers = module.callers.get(computation.name, [])
    op_name = instruction.op_name or (callers[0][1].op_name if callers else "")
    return Collective(
        kind, instruction.name, operand, result, axes, group, times, certain, len(module.loops(computation)), weight, op_name,
        ".remat" in instruction.name, between, overlapped(module, computation, instruction),
    )


def argument(module: Module, computation: Computation, name: str) -> str:
    """The name of the program argument that an instruction's result comes from, possibly cast or moved; "" if the result is
    computed. The argument's name leaves out the name of the record of a step's arguments."""
    while True:
        here = computation.instructions[name]
        if here.opcode == "parameter" and computation.entry:
            return (here.op_name or here.name).removeprefix("arguments.")
        if here.opcode == "parameter":
            called = module.callers.get(computation.name, [])
            if not called or called[0][2] != "calls":
                return ""
            computation, call, _ = called[0]
            if int(here.inside) >= len(call.operands):  # A TPU's asynchronous call can pass memory of the chip's own.
                return ""
            name = call.operands[int(here.inside)]
        elif here.opcode == "get-tuple-element":
            source = _part(module, computation, here)
            if source is None:
                return ""
            computation, name = source
        elif here.opcode == "fusion":
            fused = module.computations[here.calls("calls")]
            moved = fused.root
            while moved.opcode in MOVES:
                moved = fused.instructions[moved.operands[0]]
            if moved.opcode != "parameter":  # The fused computation does more than move or cast a parameter.
                return ""
            name = here.operands[int(moved.inside)]
        elif here.opcode in MOVES:
            name = here.operands[0]
        else:
            return ""


def _part(module: Module, computation: Computation, element: Instruction) -> tuple[Computation, str] | None:
    """(computation, name) of the instruction that a get-tuple-element selects. If a loop passes the value through unchanged,
    that is the loop's input; of an all-gather of several arrays, the array that it gathers. None if the source is neither."""
    place, source = element.index, computation.instructions[element.operands[0]]
    if source.opcode == "all-gather-done":
        source = computation.instructions[source.operands[0]]
    if source.opcode in ("all-gather", "all-gather-start"):
        return computation, source.operands[place]
    if source.opcode == "tuple":
        return computation, source.operands[place]
    if source.opcode == "parameter":
        called = module.callers.get(computation.name, [])
        if not called or called[0][1].opcode != "while":
            return None
        computation, source, _ = called[0]
    if source.opcode != "while" or not module.kept(source, place):
        return None
    carry = computation.instructions[source.operands[0]]
    return (computation, carry.operands[place]) if carry.opcode == "tuple" else None


def _axes(attributes: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """(mesh axes that the groups run over, number of devices in a group)."""
    names, sizes = tuple(mesh), tuple(mesh.values())
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        ends = np.asarray([int(x) for x in re.findall(r"\d+", pairs[1])]).reshape(-1, 2)
        moved = np.asarray(np.unravel_index(ends[:, 0], sizes)) != np.asarray(np.unravel_index(ends[:, 1], sizes))
        axes = tuple(name for name, any_moved in zip(names, moved.any(axis=1), strict=True) if any_moved)
        return axes, int(np.prod([mesh[name] for name in axes], dtype=int))
    groups = replica_groups(attributes, int(np.prod(sizes)))
    places = np.asarray(np.unravel_index(groups[0], sizes))
    varies = [len(set(row)) > 1 for row in places]
    axes = tuple(name for name, moved in zip(names, varies, strict=True) if moved)
    whole = np.prod([mesh[name] for name in axes], dtype=int) == len(groups[0])
    return (axes if whole else ()), len(groups[0])


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of devices from {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0) or mesh['a'=2,'b'=2] {'b'}."""
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("{{"):
        return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 2])]
    iota, along = _IOTA.match(text), _MESH.match(text)
    if iota:
        return _iota(*iota.groups()).tolist()
    if along:
        return _along(along)
    return [list(range(devices))]  # {} means one group of all devices.


def _iota(shape: str, dims: str, order: str | None) -> np.ndarray:
    """The ids that "[shape]<=[dims]T(order)" lists: 0, 1, 2 and so on as an array of `dims`, transposed, then reshaped."""
    lengths = np.fromstring(dims, int, sep=",")
    ids = np.arange(lengths.prod()).reshape(lengths)
    if order:
        ids = ids.transpose(np.fromstring(order, int, sep=","))
    return ids.reshape(np.fromstring(shape, int, sep=","))


def _along(match: re.Match) -> list[list[int]]:
    """The groups of a match of `_MESH`: the devices along the axes that it selects."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    count = int(np.prod(list(sizes.values())))
    ids = np.arange(count) if match[2] is None else _iota(match[2], match[3], match[4]).reshape(-1)
    chosen = {name: (int(before or 1), int(size) if size else sizes[name]) for name, before, size in _AXIS.findall(match[5])}
    # Split a partially used axis into three: the part before, the part used, and the part after.
    shape, along = [], []
    for name, size in sizes.items():
        before, part = chosen.get(name, (size, 1))
        along += [len(shape) + 1] if part > 1 else []
        shape += [before, part, size // (before * part)]
    others = [axis for axis in range(len(shape)) if axis not in along]
    grouped = ids.reshape(shape).transpose([*others, *along])
    return grouped.reshape(-1, int(np.prod([shape[axis] for axis in along], dtype=int))).tolist()
