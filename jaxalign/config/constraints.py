"""Constraints on a field's value: ranges, choices, and names in a registry."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError
from jaxalign.registry.core import Registry


class Check:
    """A constraint on a value.

    Args:
        text: completes the sentence "it must be ...".
        holds: whether a value satisfies the constraint.
        choices: the allowed values, if they can be listed. The error for a wrong value suggests the nearest one.
    """

    def __init__(self, text: str, holds: Callable[[Any], bool], choices: tuple[Any, ...] = ()):
        self._text, self._holds, self._choices = text, holds, choices

    @property
    def text(self) -> str:
        return self._text

    @property
    def choices(self) -> tuple[Any, ...]:
        return self._choices

    def require(self, value: Any, path: str) -> None:
        """Raises UserError if `value`, the value of the field at `path`, does not satisfy the constraint."""
        if not self._holds(value):
            raise UserError(f"{path} is {value!r}; it must be {self.text}{self._suggestion(value)}")

    def _suggestion(self, value: Any) -> str:
        """`; did you mean ...?` for the first entry that is not a choice; empty if no choice is similar."""
        items = value if isinstance(value, tuple) else (value,)
        wrong = next((item for item in items if item not in self.choices), "")
        names = [choice for choice in self.choices if isinstance(choice, str)]
        near = difflib.get_close_matches(wrong, names, n=1) if isinstance(wrong, str) else []
        return f"; did you mean {near[0]}?" if near else ""


class _Registered(Check):
    """A registered name, or "package.module:name". Reads the registry's names at each use, not once at import."""

    def __init__(self, registry: Registry, find: Callable[[str, str], Any] | None, sums: bool):
        self._registry, self._find, self._sums = registry, find or registry.get, sums

    @property
    def text(self) -> str:
        own = f"one of {', '.join(self.choices)}, or 'package.module:name' for your own"
        return f"{own}, or several of these joined by +" if self._sums else own

    @property
    def choices(self) -> tuple[str, ...]:
        return self._registry.names()

    def require(self, value: str, path: str) -> None:
        parts = names_in(value) if self._sums else (value,)
        for part in parts:
            self._find(part, path)
        repeated = next((part for part in parts if parts.count(part) > 1), None)
        if repeated is not None:
            raise UserError(f"{path} is {value!r}, which contains {repeated!r} twice; name each part once")


def at_least(low: float) -> Check:
    return Check(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Check:
    return Check(f"above {low}", lambda value: value > low)


def between(low: float, high: float) -> Check:
    return Check(f"between {low} and {high}", lambda value: low <= value <= high)


def one_of(*choices: str | int) -> Check:
    return Check("one of " + ", ".join(map(str, choices)), lambda value: value in choices, choices)


def some_of(*choices: str) -> Check:
    """For a tuple: one or more of the choices, without repetition, in the order of the choices."""
    return Check(f"some of {', '.join(choices)}, in this order",
                 lambda value: bool(value) and value == tuple(choice for choice in choices if choice in value), choices)


def none_or_some_of(*choices: str) -> Check:
    """Like `some_of`, but the tuple may be empty."""
    return Check(f"empty, or {some_of(*choices).text}",
                 lambda value: value == tuple(choice for choice in choices if choice in value), choices)


def registered(registry: Registry, find: Callable[[str, str], Any] | None = None) -> Check:
    """For a string: a registered name, "package.module:name" or "FILE.py:name".

    Args:
        registry: the records.
        find: `find(name, where) -> record`, used instead of `registry.get`; raises UserError if there is no record.
    """
    return _Registered(registry, find, sums=False)


def sum_of_registered(registry: Registry, find: Callable[[str, str], Any] | None = None) -> Check:
    """For a string: one or more distinct names, as in `registered`, joined by "+"."""
    return _Registered(registry, find, sums=True)
