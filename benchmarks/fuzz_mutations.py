"""Mutations of valid text, bytes and JSON values: cut, doubled, flipped, renamed, or replaced by hostile values."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from jaxalign.errors import UserError


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 10**9, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "x" * 100_000, "\ud800", "\udcff", "\x00", "\n", "None", "nan",
    "inf", "1e400", "-1", "/", "..", "a/" * 2500, "/dev/null", "\u202e", [], {}, [[]], [None], {"a": 1}, [1, "a", None],
    {"": {}}, [{}] * 3, _nested(50), list(range(3)), {"content": 5}, {"content": None}, [True], [1e400], "{{ x }}", "é" * 5,
)
"""Values that replace others."""

Mutate = Callable[[random.Random, bytes], bytes]


def _flip(chance: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(chance: random.Random, content: bytes) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _drop(chance: random.Random, content: bytes) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + content[start + chance.randrange(1, 40) :]


def _double(chance: random.Random, content: bytes) -> bytes:
    start, stop = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:stop] + content[start:]


def _insert(chance: random.Random, content: bytes) -> bytes:
    part = chance.choice((b"\xff\xfe", b"\x00", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"NaN", b"1e400",
                          b"\xef\xbb\xbf", b"\r\n", b'"\\ud800"', b"\\", b"\x1f\x8b", b"x" * 200_000, b"null", b"-1", b"true"))
    start = chance.randrange(len(content) + 1)
    return content[:start] + part + content[start:]


def _replace_whole(chance: random.Random, content: bytes) -> bytes:
    return chance.choice((b"", b"\n", b"null", b"[]", b"{}", b"0", b'"a"', b"[" * 200_000, b"\xff" * 100, b"9" * 100_000,
                          b"[{}]", b"\x1f\x8b" + content[:20], content.decode("utf-8", "replace").encode("utf-16"), b"NaN",
                          b"true"))


def mutate_bytes(chance: random.Random, content: bytes) -> bytes:
    """One random change of the bytes of a file."""
    return chance.choice((_flip, _flip, _cut, _drop, _double, _insert, _replace_whole))(chance, content)


def mutate_value(chance: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one to three random changes."""
    root = [copy.deepcopy(value)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(root))
        holder, key = chance.choice(places)
        action = chance.randrange(8)
        if action < 5 or holder is root:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))
        elif action == 5:
            del holder[key]
        elif action == 6 and isinstance(holder, dict):
            holder[str(chance.choice(HOSTILE))[:2000]] = holder.pop(key)
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
    return root[0]


def _places(holder: Any):
    """Yields the container and the key of every value within a container, at most 40 for each."""
    entries = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    for key, inner in entries[:40]:
        yield holder, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def to_json(value: Any) -> bytes:
    """JSON with NaN, infinities and lone surrogates as escapes."""
    return json.dumps(value).encode()


def mutate_json(chance: random.Random, content: bytes) -> bytes:
    """A random change of a JSON file: of its values, or of its bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, content)
    return to_json(mutate_value(chance, json.loads(content)))


def mutate_jsonl(chance: random.Random, content: bytes) -> bytes:
    """A random change of a JSONL file: of the values of some lines, or of its bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, content)
    lines = content.splitlines()
    for _ in range(chance.choice((1, 2, len(lines)))):
        at = chance.randrange(len(lines))
        lines[at] = to_json(mutate_value(chance, json.loads(content.splitlines()[at])))
    return b"\n".join(lines) + b"\n"


def all_of(*readers: Callable[[], Any]) -> None:
    """Calls every reader, and then raises the last UserError."""
    last = None
    for read in readers:
        try:
            read()
        except UserError as error:
            last = error
    if last is not None:
        raise last
