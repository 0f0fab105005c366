"""Parses the text of a compiled program (XLA's HLO): computations, their instructions, and how often each runs.

Reads only the parts that determine a program's traffic and matrix products. The format is that of
`jax.stages.Compiled.as_text` for the CPU, GPU and TPU compilers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_END = re.compile(r"^\}(?:, execution_thread=.*)?\s*$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_ARRAY = re.compile(r"\b(?P<type>pred|token|[a-z]+\d+\w*)\[(?P<sizes>[\d,<= ]*)\]")
_BITS = re.compile(r"\D+(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|"
                     r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # The text between the parentheses; for a constant, its value.
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result; for a tuple, the sum over its elements."""
        return type_bytes(self.type)

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(attribute, computation) of every computation that the instruction names."""
        pairs = []
        for match in _CALLED.finditer(self.attributes):
            kind = match[0].partition("=")[0]
            pairs += [(kind, name.strip().lstrip("%")) for name in match[1].strip("{}").split(",") if name.strip()]
        return tuple(pairs)

    @property
    def op_name(self) -> str:
        """The JAX operation that the instruction belongs to; for a parameter, its path in the arguments."""
        match = _OP_NAME.search(self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(re.search(r"index=(\d+)", self.attributes)[1])

    def calls(self, kind: str) -> str | None:
        return next((name for attribute, name in self.called if attribute == kind), None)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    entry: bool
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(x for x in self.instructions.values() if x.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.inside): x for x in self.instructions.values() if x.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program. `entry` raises ValueError if the program has no entry computation."""

    computations: dict[str, Computation]

    @functools.cached_property
    def entry(self) -> Computation:
        entries = [x for x in self.computations.values() if x.entry]
        if not entries:
            raise ValueError("the text has no ENTRY computation")
        return entries[0]

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction, str]]]:
        """(computation, instruction, attribute) of each call to a computation, by its name, except calls by reductions."""
        callers: dict[str, list[tuple[Computation, Instruction, str]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for kind, name in instruction.called:
                    # Count an asynchronous call at its start; async-update and async-done only refer to it.
                    if kind != "to_apply" and instruction.opcode not in ("async-update", "async-done"):
                        callers.setdefault(name, []).append((computation, instruction, kind))
        return callers

    def loops(self, computation: Computation) -> tuple[Instruction, ...]:
        """The while instructions around a computation, outermost first, following the first caller of each computation."""
        loops, here = [], computation
        while not here.entry and here.name in self.callers:
            here, instruction, kind = self.callers[here.name][0]
            if instruction.opcode == "while":
                loops.append(instruction)
        return tuple(reversed(loops))

    def kept(self, loop: Instruction, place: int) -> bool:
        """Whether element `place` of a loop's carry is the same in every iteration."""
        body = self.computations[loop.calls("body")]
        if body.root.opcode != "tuple":
            return False
        return _tuple_place(body, body.instructions[body.root.operands[place]]) == place

    def trips(self, loop: Instruction) -> int | None:
        """The number of iterations of a while loop; None if the text does not determine it.

        It is the compiler's annotation, or follows from a counter that starts at a constant, is incremented by a constant and
        is compared with a constant.
        """
        noted = _TRIPS.search(loop.attributes)
        if noted:
            return int(noted[1])
        condition = self.computations[loop.calls("condition")]
        compare, names = condition.root, condition.root.operands
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes or len(names) != 2:
            return None
        place = _tuple_place(condition, condition.instructions[names[0]])
        limit = self._constant(condition, condition.instructions[names[1]], loop)
        if place is None or limit is None:
            return None
        first, step = self._initial(loop, place), self._step(loop, place)
        return None if first is None or step is None else max(0, -(-(limit - first) // step))

    def _step(self, loop: Instruction, place: int) -> int | None:
        """The positive constant added to element `place` of a loop's carry in each iteration; None if it is not constant."""
        body = self.computations[loop.calls("body")]
        if body.root.opcode != "tuple":
            return None
        total = _uncopied(body, body.instructions[body.root.operands[place]])
        if total.opcode != "add" or len(total.operands) != 2:
            return None
        parts = [body.instructions[name] for name in total.operands]
        if _tuple_place(body, parts[0]) != place:
            parts.reverse()
        step = self._constant(body, parts[1], loop) if _tuple_place(body, parts[0]) == place else None
        return step if step is not None and step > 0 else None

    def _constant(self, where: Computation, instruction: Instruction, loop: Instruction | None = None) -> int | None:
        """The integer value of an instruction, through copies and, within `loop`, through the loop's inputs; None if it is not
        a constant."""
        instruction = _uncopied(where, instruction)
        if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.inside):
            return int(instruction.inside)
        place = _tuple_place(where, instruction)
        return None if place is None or loop is None else self._initial(loop, place)

    def _initial(self, loop: Instruction, place: int) -> int | None:
        """The constant with which element `place` of a loop's carry enters the loop; None if it is not a constant."""
        around = self.callers[loop.calls("body")][0][0]
        carry = around.instructions[loop.operands[0]]
        if carry.opcode != "tuple":
            return None
        return self._constant(around, around.instructions[carry.operands[place]])

    def times(self, computation: Computation, unknown: int = 1) -> tuple[int, bool]:
        """(executions of a computation in one run of the program, whether the number is exact). A loop with an unknown number
        of iterations counts `unknown` times; a branch counts as always taken."""
        times, certain = 1, True
        for loop in self.loops(computation):
            trips = self.trips(loop)
            certain &= trips is not None
            times *= unknown if trips is None else trips
        return times, certain


def _uncopied(where: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
        instruction = where.instructions[instruction.operands[0]]
    return instruction


def _tuple_place(where: Computation, instruction: Instruction) -> int | None:
    """The index of the element of the computation's parameter that an instruction selects; None if it does not select one."""
    instruction = _uncopied(where, instruction)
    if instruction.opcode != "get-tuple-element" or where.instructions[instruction.operands[0]].opcode != "parameter":
        return None
    return instruction.index


def parse(text: str) -> Module:
    """The module of `Compiled.as_text()`."""
    computations, header, lines = {}, None, []
    for line in text.splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif _END.match(line):
            held = {one.name: one for one in map(_instruction, lines)}
            computations[header["name"]] = Computation(header["name"], bool(header["entry"]), held)
            header = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:  # A continuation line: a constant of several rows, or a kernel's settings.
            lines[-1] += " " + line
    return Module(computations)


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    rest = line[start.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else 0
    space = rest.index(" ", end)
    opening = rest.index("(", space)
    closing = _closing(rest, opening)
    inside, kind, opcode = rest[opening + 1 : closing], rest[:space], rest[space + 1 : opening]
    # The GPU compiler of JAX 0.11 starts some fusions asynchronously. The start has the type (operands, result, context); read
    # it as the fusion.
    if opcode == "fusion-start":
        kind, opcode = tuple_parts(kind)[1], "fusion"
    elif opcode == "fusion-done":
        opcode = "bitcast"
    return Instruction(
        start["name"], kind, opcode, tuple(_OPERAND.findall(inside)), inside, rest[closing + 1 :], bool(start["root"])
    )


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def tuple_parts(text: str) -> list[str]:
    """The types of the elements of a tuple type."""
    text, parts, depth, begin = text[1:-1], [], 0, 0
    for place, letter in enumerate(text):  # Split at the commas outside brackets.
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def type_bytes(text: str) -> int:
    """Bytes of a type such as `bf16[16,1024]{1,0}` or of a tuple of types, without layout padding."""
    total = 0
    for array in _ARRAY.finditer(text):
        if array["type"] == "token":
            continue
        count = math.prod(int(size.strip(" <=")) for size in array["sizes"].split(",") if size.strip(" <="))
        bits = 8 if array["type"] == "pred" else int(_BITS.match(array["type"])[1])
        total += -(-count * bits // 8)
    return total
