"""Checks the names of the arguments of `fit`: several of them are often given to the wrong call."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxalign.config.schema import field_types
from jaxalign.errors import UserError

F = TypeVar("F", bound=Callable)


def named_arguments(fit: F) -> F:
    """Decorates a trainer's method `fit`: an argument that it does not have raises UserError instead of TypeError."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def checked_fit(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            signature.bind(self, *arguments, **named)
        except TypeError as error:
            raise UserError(_refusal(self, list(signature.parameters)[1:], named, error)) from None
        return fit(self, *arguments, **named)

    return checked_fit


def _refusal(trainer: Any, known: list[str], named: dict[str, Any], error: TypeError) -> str:
    call, owner = f"{trainer.name}.fit", type(trainer).__name__
    unknown = next((name for name in named if name not in known), None)
    if unknown is None:
        return f"{call} was called with wrong arguments ({error}); {', '.join(known)} are expected"
    if unknown in inspect.signature(type(trainer).__init__).parameters or unknown in field_types(type(trainer.section)):
        return f"{unknown} is an argument of {owner}, not of {call}: create the trainer with {owner}(..., {unknown}=...)"
    near = difflib.get_close_matches(unknown, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{unknown} is not an argument of {call}; {', '.join(known)} are expected{hint}"
