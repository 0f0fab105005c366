"""Conditions under which an option has an effect: how a field declares them, and the check that enforces them.

    lam: float = field(0.95, "Lambda of GAE.", between(0.0, 1.0), chosen("advantages", ADVANTAGES))
    kl_target: float = field(6.0, "Target KL.", above(0), when("kl_controller", "adaptive"))

An option that differs from its default but is not read under the other settings is an error, since it would have no effect.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, names_in


@dataclasses.dataclass(frozen=True)
class ReadBy:
    """The condition under which a field is read.

    Attributes:
        selector: the field that determines whether the option is read: its name in the same section, or its full dotted name.
        reads: `reads(value, name)`: whether the option `name` is read when the selector has `value`.
        readers: `readers(value, name)`: the selector's values with which the option is read; completes "or set SELECTOR ...".
    """

    selector: str
    reads: Callable[[Any, str], bool]
    readers: Callable[[Any, str], str]


def when(selector: str, *values: Any) -> ReadBy:
    """Read when the selector has one of `values`. If it is a sum such as "a+b", one part suffices."""

    def reads(value: Any, name: str) -> bool:
        return value in values or (isinstance(value, str) and not set(values).isdisjoint(names_in(value)))

    return ReadBy(selector, reads, lambda selected, name: _alternatives(values))


def unless(selector: str, value: Any, otherwise: str) -> ReadBy:
    """Read unless the selector has `value`. `otherwise` completes "or set SELECTOR ...", for example "above 0"."""
    return ReadBy(selector, lambda selected, name: selected != value, lambda selected, name: otherwise)


def chosen(selector: str, registry: Registry, attribute: str = "reads") -> ReadBy:
    """Read when the selected record reads it. If the selector is a sum such as "a+b", one part suffices.

    Args:
        selector: the field that selects records of `registry`.
        registry: the records.
        attribute: "reads", the names of the fields that a record reads (None: all), or a flag such as "needs_critic".
    """

    def record_reads(record: Any, name: str) -> bool:
        fields = getattr(record, attribute)
        return name in fields if isinstance(fields, tuple) else fields is None or bool(fields)

    def reads(value: str, name: str) -> bool:
        return any(record_reads(registry.get(part, f"config.{selector}"), name) for part in names_in(value))

    def readers(value: str, name: str) -> str:
        custom = next((part for part in names_in(value) if part not in registry.builtin), None)
        declaration = f"{attribute}=True" if attribute != "reads" else f"{name!r} in reads"
        others = _alternatives(r.name for r in registry if record_reads(r, name))
        return others if custom is None else f"{others}, or declare {declaration} in the record of {custom!r} if it reads it"

    return ReadBy(selector, reads, readers)


def require_fields(record: Any, kind: str, section: Any, name: str) -> None:
    """Checks that the names in the `reads` of a record are fields of a section.

    Args:
        record: the record.
        kind: what it is, for the error message.
        section: the section's values.
        name: its name.

    Raises:
        UserError: a name is not a field.
    """
    known = [entry.name for entry in dataclasses.fields(section)]
    for unknown in (field for field in record.reads if field not in known):
        near = difflib.get_close_matches(unknown, known, n=1)
        raise UserError(f"the reads of {kind} {record.name!r} has {unknown!r}, which is not a field of config.{name}; names of "
                        "its fields are expected" + (f": did you mean {near[0]}?" if near else ""))


def refuse_unread(section: Any, usual: Any, name: str, value_of: Callable[[str], Any]) -> None:
    """Checks that every option of a section that differs from its default is read.

    Args:
        section: the section's values.
        usual: its defaults.
        name: its dotted name.
        value_of: returns the value at a full dotted name.

    Raises:
        UserError: a field differs from its default but is not read.
    """
    for entry in dataclasses.fields(section):
        value, default = getattr(section, entry.name), getattr(usual, entry.name)
        if value == default:
            continue
        for conditions in unmet(entry, name, value_of):
            field, value, default = _differing(value, default, f"{name}.{entry.name}")
            settings = " and ".join(f"config.{selector} is {value_of(selector)!r}" for selector in conditions)
            remedies = " or ".join(f"config.{selector} {each.readers(value_of(selector), entry.name)}"
                                   for selector, each in conditions.items())
            raise UserError(f"config.{field} is {value!r}, which has no effect when {settings}: leave it at {default!r}, or "
                            f"set {remedies}")


def unmet(entry: dataclasses.Field, section: str, value_of: Callable[[str], Any]) -> Iterator[dict[str, ReadBy]]:
    """Yields each unmet condition of a field of `section`: its alternatives, by the full dotted name of their selector."""
    for condition in entry.metadata.get("read_by", ()):
        alternatives = {
            each.selector if "." in each.selector else f"{section}.{each.selector}": each
            for each in (condition if isinstance(condition, tuple) else (condition,))
        }
        if not any(each.reads(value_of(selector), entry.name) for selector, each in alternatives.items()):
            yield alternatives


def _differing(value: Any, default: Any, name: str) -> tuple[str, Any, Any]:
    """(name, value, default) of the first nested field that differs from its default; a plain value is returned unchanged."""
    if dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            inner, usual = getattr(value, entry.name), getattr(default, entry.name)
            if inner != usual:
                return _differing(inner, usual, f"{name}.{entry.name}")
    return name, value, default


def _alternatives(values: Any) -> str:
    *most, last = [value if isinstance(value, str) else repr(value) for value in values]
    return f"to {', '.join(most)} or {last}" if most else f"to {last}"
