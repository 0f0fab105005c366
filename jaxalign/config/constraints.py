"""Constraints on a field's value: ranges, choices, and names in a registry."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Protocol

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, names_in


class Constraint(Protocol):
    """A constraint on the value of a field."""

    @property
    def text(self) -> str:
        """Completes the sentence "it must be ..."."""

    def require(self, value: Any, path: str) -> None:
        """Raises UserError if `value`, the value of the field at `path`, does not satisfy the constraint."""


@dataclasses.dataclass(frozen=True)
class ValueConstraint:
    """A constraint on a value that does not depend on registries.

    Attributes:
        text: completes the sentence "it must be ...".
        holds: whether a value satisfies the constraint.
        choices: the allowed values, if they can be listed.
    """

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()

    def require(self, value: Any, path: str) -> None:
        """See `Constraint`. The error suggests a choice that is similar to the first entry that is not a choice."""
        if self.holds(value):
            return
        items = value if isinstance(value, tuple) else (value,)
        wrong = next((item for item in items if item not in self.choices), "")
        names = [choice for choice in self.choices if isinstance(choice, str)]
        near = difflib.get_close_matches(wrong, names, n=1) if isinstance(wrong, str) else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{path} is {value!r}; it must be {self.text}{hint}")


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A registered name, or "package.module:name". Reads the registry's names at each use, not once at import."""

    registry: Registry
    find: Callable[[str, str], Any]
    sums: bool

    @property
    def text(self) -> str:
        """See `Constraint`."""
        own = f"one of {', '.join(self.registry.names())}, or 'package.module:name' for your own"
        return f"{own}, or several of these joined by +" if self.sums else own

    def require(self, value: str, path: str) -> None:
        """See `Constraint`."""
        parts = names_in(value) if self.sums else (value,)
        for part in parts:
            self.find(part, path)
        repeated = next((part for part in parts if parts.count(part) > 1), None)
        if repeated is not None:
            raise UserError(f"{path} is {value!r}, which contains {repeated!r} twice; name each part once")


def at_least(low: float) -> ValueConstraint:
    return ValueConstraint(f"at least {low}", lambda value: value >= low)


def at_least_or(low: float, name: str) -> ValueConstraint:
    """For a field that is a number or the string `name`."""
    return ValueConstraint(
        f"at least {low}, or {name!r}", lambda value: value == name if isinstance(value, str) else value >= low
    )


def above(low: float) -> ValueConstraint:
    return ValueConstraint(f"above {low}", lambda value: value > low)


def between(low: float, high: float) -> ValueConstraint:
    return ValueConstraint(f"between {low} and {high}", lambda value: low <= value <= high)


def one_of(*choices: str | int) -> ValueConstraint:
    return ValueConstraint("one of " + ", ".join(map(str, choices)), lambda value: value in choices, choices)


def some_of(*choices: str) -> ValueConstraint:
    """For a tuple: one or more of the choices, without repetition, in the order of the choices."""
    return ValueConstraint(f"some of {', '.join(choices)}, in this order",
                 lambda value: bool(value) and value == tuple(choice for choice in choices if choice in value), choices)


def none_or_some_of(*choices: str) -> ValueConstraint:
    """Like `some_of`, but the tuple may be empty."""
    return ValueConstraint(f"empty, or {some_of(*choices).text}",
                 lambda value: value == tuple(choice for choice in choices if choice in value), choices)


def registered(registry: Registry, find: Callable[[str, str], Any] | None = None, sums: bool = False) -> Constraint:
    """For a string: a registered name, "package.module:name" or "FILE.py:name".

    Args:
        registry: the records.
        find: `find(name, where) -> record`, used instead of `registry.get`; raises UserError if there is no record.
        sums: allow several distinct names joined by "+".
    """
    return _Registered(registry, find or registry.get, sums)
