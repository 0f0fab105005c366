"""The schema of the config: frozen dataclasses with fields that carry their documentation and constraint.

A section is a frozen dataclass; `field` defines a value and `section` a nested dataclass. The dataclasses determine the
editable ConfigDict of config files, the checked typed tree, the plain dictionary and the reference page. The error message for
an unknown field suggests the most likely one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import config_dict

from jaxalign.config.constraints import Constraint
from jaxalign.config.reading import ReadBy
from jaxalign.errors import UserError, shown

FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38  # The smallest normal number.


def field(default: Any, doc: str, check: Constraint | None = None, *read_by: ReadBy | tuple[ReadBy, ...]) -> Any:
    """A field of a section.

    Args:
        default: the default value.
        doc: one line of documentation.
        check: the constraint, or None. A value of None satisfies any constraint.
        read_by: the conditions under which the field is read. Unless all hold, only the default is accepted. A tuple of
            conditions holds if at least one of them does.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "read_by": read_by})


def like(owner: type, name: str, **changes: Any) -> Any:
    """The field `name` of the section `owner`, with a different `default`, `doc`, `check` or `read_by`."""
    entry = next(entry for entry in dataclasses.fields(owner) if entry.name == name)
    default = changes.pop("default", entry.default)
    return dataclasses.field(default=default, metadata=dict(entry.metadata) | changes)


def section(default: Any, doc: str = "", *read_by: ReadBy) -> Any:
    """A nested section. `default` is an instance, which is frozen and therefore safe to share."""
    metadata = {"doc": doc, "check": None, "read_by": read_by}
    return dataclasses.field(default_factory=lambda: default, metadata=metadata)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved type of every field: first the fields that the class declares, in order, then the inherited ones."""
    hints = typing.get_type_hints(cls)
    declared = dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get("__annotations__", ()))
    names = {entry.name for entry in dataclasses.fields(cls)}
    return {name: hints[name] for name in declared if name in names}


def type_name(kind: Any) -> str:
    """The name of a type in messages: `int`, `float or None`, `tuple of str`."""
    if isinstance(kind, types.UnionType):
        return " or ".join("None" if part is type(None) else type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"tuple of {type_name(typing.get_args(kind)[0])}"
    return kind.__name__


def to_config_dict(instance: Any) -> config_dict.ConfigDict:
    """The editable form of a section. It accepts any key and type; `from_mapping` checks them with better error messages.

    Numbers, bools and optional values are references of type object: command-line values are parsed as literals (0.5, True,
    None), and the schema checks them. Strings and tuples keep their type, so that 007 stays a string.
    """
    result = config_dict.ConfigDict(type_safe=False)
    for name, kind in field_types(type(instance)).items():
        value = getattr(instance, name)
        if dataclasses.is_dataclass(kind):
            result[name] = to_config_dict(value)
        elif kind is str or typing.get_origin(kind) is tuple:
            result[name] = value
        else:
            result[name] = config_dict.FieldReference(value, field_type=object)
    return result


def to_plain(value: Any) -> Any:
    """A section or a value as JSON values: dictionaries, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in field_types(type(value))}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def get(instance: Any, dotted: str) -> Any:
    """The value or section at a dotted name, such as `ppo.optimizer.b1`. Raises KeyError if it does not exist."""
    for part in dotted.split("."):
        if not dataclasses.is_dataclass(instance) or part not in field_types(type(instance)):
            raise KeyError(dotted)
        instance = getattr(instance, part)
    return instance


def flatten(instance: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its full dotted name."""
    result = {}
    for name, kind in field_types(type(instance)).items():
        value = getattr(instance, name)
        result.update(flatten(value, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {f"{prefix}{name}": value})
    return result


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each field of a config that is given as dictionaries."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def from_mapping(default: Any, values: Mapping[str, Any], path: str = "config", root: Any = None) -> Any:
    """`default` with the fields in `values` replaced.

    Args:
        default: a section.
        values: values by field name; a nested section is a mapping or an instance of its class.
        path: the name of `default` in error messages.
        root: the whole config, searched for suggestions of similar names; None: `default`.

    Raises:
        UserError: a key is unknown, a value has the wrong type, or a value violates its constraint.
    """
    root = default if root is None else root
    kinds = field_types(type(default))
    entries = {entry.name: entry for entry in dataclasses.fields(default)}
    changes = {}
    for name in values:
        if name not in kinds:
            raise UserError(unknown_name(root, f"{path}.{name}"))
        value, full = values[name], f"{path}.{name}"
        if not dataclasses.is_dataclass(kinds[name]):
            changes[name] = checked(value, kinds[name], full, entries[name].metadata["check"])
        elif type(value) is kinds[name]:
            changes[name] = from_mapping(getattr(default, name), vars(value), full, root)
        elif isinstance(value, (Mapping, config_dict.ConfigDict)):
            changes[name] = from_mapping(getattr(default, name), value, full, root)
        else:
            fields = ", ".join(field_types(kinds[name]))
            raise UserError(f"{full} is {value!r}, but it is a section; set its fields individually: {fields}")
    return dataclasses.replace(default, **changes)


def require_valid(instance: Any, path: str) -> None:
    """Converts and checks the values of a section without nested sections that a caller has constructed. Raises UserError."""
    kinds = field_types(type(instance))
    for entry in dataclasses.fields(instance):
        value = checked(getattr(instance, entry.name), kinds[entry.name], f"{path}.{entry.name}", entry.metadata["check"])
        object.__setattr__(instance, entry.name, value)


def checked(value: Any, kind: Any, path: str, check: Constraint | None = None) -> Any:
    """`convert`, and a check that the result satisfies a constraint. A value of None satisfies any constraint.

    Raises:
        UserError: the value has the wrong type or violates the constraint.
    """
    value = convert(value, kind, path)
    if check is not None and value is not None:
        check.require(value, path)
    return value


def convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as the schema's type `kind`. An int converts to a float, and a list to a tuple; nothing else is converted.

    Raises:
        UserError: the value has the wrong type, or is a number that is not finite in float32.
    """
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # A numpy or JAX scalar.
        value = value.item()
    if type(value) is int and value.bit_length() > 1023:  # Neither a float nor, if longer, a text can be made of it.
        raise UserError(f"{path} is a whole number of {value.bit_length()} bits; a smaller number is expected")
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is float and type(value) in (int, float):
            if not math.isfinite(value):
                raise UserError(f"{path} is {value}; a finite number is expected")
            if abs(value) > FLOAT32_MAX:
                raise UserError(f"{path} is {value}; a number that float32 can represent is expected")
            if 0 < abs(value) < FLOAT32_TINY:
                raise UserError(f"{path} is {value}, which float32 rounds to 0; 0 or a number of at least 1.2e-38 is expected")
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


def unknown_name(root: Any, path: str) -> str:
    """The error message for a dotted name that is not a field.

    It suggests the most similar field of the same section or of a nested section, else a field with that name elsewhere.

    Args:
        root: the whole config.
        path: the full name; the part before its first dot is the name of the config.
    """
    path = shown(path)
    top, *parts = path.split(".")
    here = root
    for depth, part in enumerate(parts):
        names = [entry.name for entry in dataclasses.fields(here)]
        if part not in names:
            break
        here = getattr(here, part)
        if not dataclasses.is_dataclass(here):
            return f"{path} is not a field: {'.'.join([top, *parts[:depth + 1]])} is a value, not a section"
    owner, wrong, wanted = (parts[depth - 1] if depth else top), ".".join([top, *parts[:depth + 1]]), parts[-1]
    section = wrong.rsplit(".", 1)[0]
    sentence = f"{wrong} is not a field of {owner}"
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
    # The field may be in a nested section. Prefer an equally similar field of the same section.
    below = [name for name in _flat_names(here) if "." in name] if depth + 1 == len(parts) else []
    best = max(below, key=lambda name: _likeness(name, part), default="")
    if best and _likeness(best, part) > max(0.8, _likeness(near[0], part) if near else 0):
        return f"{sentence}; did you mean {section}.{best}?"
    if near:
        return f"{sentence}; did you mean {near[0]}?"
    # No name is similar, so this may be a field of another section.
    same = [f"{top}.{name}" for name in _flat_names(root) if name.rsplit(".", 1)[-1] == wanted]
    inside = [full for full in same if full.startswith(f"{section}.")]
    if same:
        return f"{sentence}; did you mean {(inside or same)[0]}?"
    return f"{sentence}; its fields are {', '.join(names)}"


def _flat_names(section: Any, prefix: str = "") -> list[str]:
    """The dotted names of all values inside a section."""
    names = []
    for entry in dataclasses.fields(section):
        value, name = getattr(section, entry.name), f"{prefix}{entry.name}"
        names += _flat_names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return names


def _likeness(name: str, wanted: str) -> float:
    """The similarity of the last part of a dotted name to a wanted name, from 0 to 1."""
    return difflib.SequenceMatcher(None, name.rsplit(".", 1)[-1], wanted).ratio()
