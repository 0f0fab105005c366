"""The machinery behind the config: frozen dataclasses whose fields carry their documentation and their check.

A section is a frozen dataclass; its fields are made with `field` (a value) or `section` (a dataclass inside). From it
come the editable ConfigDict of config files, the checked typed tree, the plain dictionary and the reference page.
Nothing here imports JAX, so a config is read in milliseconds.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import config_dict

from jaxalign.errors import UserError

FLOAT32_MAX = 3.4028234663852886e38


@dataclasses.dataclass(frozen=True)
class Check:
    """What a value must satisfy. `text` completes the sentence "it must be ..."."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def at_least(low: float) -> Check:
    return Check(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Check:
    return Check(f"above {low}", lambda value: value > low)


def between(low: float, high: float) -> Check:
    return Check(f"between {low} and {high}", lambda value: low <= value <= high)


def one_of(*choices: str | int) -> Check:
    return Check("one of " + ", ".join(map(str, choices)), lambda value: value in choices, choices)


def some_of(*choices: str) -> Check:
    """For a tuple: at least one entry, each of them a choice, none twice, in the order of the choices."""
    return Check(f"some of {', '.join(choices)}, in this order",
                 lambda value: bool(value) and value == tuple(choice for choice in choices if choice in value), choices)


def none_or_some_of(*choices: str) -> Check:
    """As `some_of`, or no entry at all."""
    some = some_of(*choices)
    return Check(f"empty, or {some.text}", lambda value: not value or some.holds(value), choices)


def sum_of(*choices: str) -> Check:
    """For a string: choices joined by "+", none twice."""

    def holds(value: str) -> bool:
        parts = value.split("+")
        return all(part in choices for part in parts) and len(set(parts)) == len(parts)

    return Check(f"one of {', '.join(choices)}, or some of them joined by +", holds, choices)


def field(default: Any, doc: str, check: Check | None = None) -> Any:
    """A field of a section: its default, a line of documentation and, if any, its check (None always passes it)."""
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check})


def section(default: Any, doc: str) -> Any:
    """A section inside a section; `default` is an instance (frozen, hence safe to share)."""
    return dataclasses.field(default_factory=lambda: default, metadata={"doc": doc, "check": None})


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Every field's resolved annotation, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def type_name(kind: Any) -> str:
    """A type in words: `int`, `float or None`, `tuple of str`."""
    if isinstance(kind, types.UnionType):
        return " or ".join("None" if part is type(None) else type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"tuple of {type_name(typing.get_args(kind)[0])}"
    return kind.__name__


def to_config_dict(instance: Any) -> config_dict.ConfigDict:
    """The editable form of a section. It takes any key and type: `from_mapping` checks, and explains better.

    Numbers, flags and optional values are references of type object, so that a command line's value is read as a
    literal (0.5, True, None) and judged by the schema; strings and tuples keep their type, so that 007 stays a string.
    """
    result = config_dict.ConfigDict(type_safe=False)
    for name, kind in field_types(type(instance)).items():
        value = getattr(instance, name)
        if is_section(kind):
            result[name] = to_config_dict(value)
        elif kind is str or typing.get_origin(kind) is tuple:
            result[name] = value
        else:
            result[name] = config_dict.FieldReference(value, field_type=object)
    return result


def to_plain(value: Any) -> Any:
    """A section, or a value of one, as JSON holds it: dictionaries, lists and scalars."""
    if is_section(value):
        return {name: to_plain(getattr(value, name)) for name in field_types(type(value))}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def get(instance: Any, dotted: str) -> Any:
    """The value (or section) at a dotted name, e.g. `ppo.optimizer.b1`. Raises KeyError when there is none."""
    for part in dotted.split("."):
        if not is_section(instance) or part not in field_types(type(instance)):
            raise KeyError(dotted)
        instance = getattr(instance, part)
    return instance


def flatten(instance: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its full dotted name."""
    result = {}
    for name, kind in field_types(type(instance)).items():
        value = getattr(instance, name)
        result.update(flatten(value, f"{prefix}{name}.") if is_section(kind) else {f"{prefix}{name}": value})
    return result


def from_mapping(default: Any, values: Mapping[str, Any], path: str = "config", root: Any = None) -> Any:
    """A section like `default` with `values` put in; what is not given keeps the default.

    Raises:
        UserError: an unknown key, a value of another type than the schema's, or one that fails its field's check.
    """
    root = default if root is None else root
    kinds = field_types(type(default))
    entries = {entry.name: entry for entry in dataclasses.fields(default)}
    changes = {}
    for name in values:
        if name not in kinds:
            raise UserError(unknown_name(root, f"{path}.{name}"))
        value, full = values[name], f"{path}.{name}"
        if not is_section(kinds[name]):
            changes[name] = _checked(convert(value, kinds[name], full), entries[name].metadata["check"], full)
        elif isinstance(value, (Mapping, config_dict.ConfigDict)):
            changes[name] = from_mapping(getattr(default, name), value, full, root)
        else:
            fields = ", ".join(field_types(kinds[name]))
            raise UserError(f"{full} is {value!r}; it is a section, whose fields are set one by one: {fields}")
    return dataclasses.replace(default, **changes)


def convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as the schema's type `kind`: an int may stand for a float, a list for a tuple; nothing else is bent.

    Raises:
        UserError: it is of another type, or not a finite number.
    """
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    value = value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value  # numpy scalars
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is float and type(value) in (int, float):
            if not math.isfinite(value):
                raise UserError(f"{path} is {value}; a finite number is expected")
            if abs(value) > FLOAT32_MAX:
                raise UserError(f"{path} is {value}; a number that float32 can hold is expected")
            return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, (tuple, list)):
            item_kind = typing.get_args(option)[0]
            return tuple(convert(item, item_kind, f"{path}[{index}]") for index, item in enumerate(value))
        if option in (int, bool, str) and type(value) is option:
            return value
    name = type_name(kind)
    article = "an" if name[0] in "aeiou" else "a"
    given = "None" if value is None else f"{value!r} ({type(value).__name__})"
    raise UserError(f"{path} is {given}; {article} {name} is expected")


def _checked(value: Any, check: Check | None, path: str) -> Any:
    if value is None or check is None or check.holds(value):
        return value
    hint = ""
    if check.choices:
        items = value if isinstance(value, tuple) else (value,)
        wrong = next((item for item in items if item not in check.choices), "")
        near = difflib.get_close_matches(wrong, check.choices, n=1) if isinstance(wrong, str) else ()
        hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{path} is {value!r}; it must be {check.text}{hint}")


def unknown_name(root: Any, path: str) -> str:
    """The sentence about a dotted name that is no field: the nearest field of its section, else the nearest anywhere.

    Args:
        root: the whole config.
        path: the name in full; what stands before its first dot is the config's own name.
    """
    top, *parts = path.split(".")
    here = root
    for depth, part in enumerate(parts):
        names = field_types(type(here))
        if part not in names:
            break
        here = getattr(here, part)
        if not is_section(here):
            return f"{path} is not a field: {'.'.join([top, *parts[:depth + 1]])} is a value, not a section"
    owner, wrong, wanted = (parts[depth - 1] if depth else top), ".".join([top, *parts[:depth + 1]]), parts[-1]
    likeness = lambda name: difflib.SequenceMatcher(None, name.rsplit(".", 1)[-1], part).ratio()  # noqa: E731
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
    # A field that has moved into a section below; its own neighbours are the likelier ones.
    below = max((name for name in flatten(here) if "." in name), key=likeness, default="") if depth + 1 == len(parts) else ""
    if below and likeness(below) > max(0.8, likeness(near[0]) if near else 0):
        return f"{wrong} is not a field of {owner}; did you mean {wrong.rsplit('.', 1)[0]}.{below}?"
    if near:
        return f"{wrong} is not a field of {owner}; did you mean {near[0]}?"
    # Not a slip of the pen then, but a field looked for in the wrong section.
    same = [f"{top}.{name}" for name in flatten(root) if name.rsplit(".", 1)[-1] == wanted]
    inside = [full for full in same if full.startswith(wrong.rsplit(".", 1)[0] + ".")]
    if same:
        return f"{wrong} is not a field of {owner}; did you mean {(inside or same)[0]}?"
    return f"{wrong} is not a field of {owner}; its fields are {', '.join(names)}"
