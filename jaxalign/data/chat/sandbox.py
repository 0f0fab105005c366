"""Runs untrusted Jinja templates: in a sandbox, with limits on loops, powers, repetitions and output.

The sandbox is Jinja's immutable one: no attributes that begin with an underscore, no changes to the arguments. Chat templates
(`template.py`) and request templates (`requests.py`) both run in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox

from jaxalign.errors import UserError

MAX_TEXT = 10_000_000
"""The maximum number of characters that a template may write."""
MAX_NUMBERS = 1_000_000
"""The maximum total length of all ranges of one rendering."""


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _TooMuch(jinja2.TemplateError):
    """A limit was exceeded."""


class Ranges:
    """`range` for one rendering, with at most MAX_NUMBERS numbers over all ranges."""

    def __init__(self):
        self.left = MAX_NUMBERS

    def __call__(self, *arguments: int) -> range:
        found = jinja2.sandbox.safe_range(*arguments)
        self.left -= len(found)
        if self.left < 0:
            raise _TooMuch(f"its ranges have more than {MAX_NUMBERS} numbers")
        return found


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the size of repetitions and powers before computing them. Takes the arguments of `jinja2.Environment`."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > 64:
            raise _TooMuch(f"it computes a power of {right}")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int) and len(items) * times > MAX_TEXT:
                raise _TooMuch(f"it repeats something {times} times")
        return super().call_binop(context, operator, left, right)


def raise_exception(message: str) -> None:
    """The function of this name that templates may call."""
    raise Refused(message)


def run(template: jinja2.Template, variables: Mapping[str, Any], what: str, about: str) -> str:
    """The text that a template of an `Environment` writes.

    Args:
        template: the compiled template.
        variables: its variables.
        what: names the template in errors, as in "the chat template of FOLDER".
        about: describes its input in errors, as in "a dialogue (roles user)".

    Raises:
        Refused: the template called raise_exception.
        UserError: the template fails, does something that the sandbox forbids, or exceeds a limit.
    """
    parts, length = [], 0
    try:
        for part in template.generate({"range": Ranges(), **variables}):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise _TooMuch(f"it writes more than {MAX_TEXT} characters")
    except Refused:
        raise
    except jinja2.sandbox.SecurityError as error:
        raise UserError(f"{what} does something that the sandbox forbids: {error}; do not use it") from None
    except (_TooMuch, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(f"{what} exceeds a limit: {error or type(error).__name__}; fix it") from None
    except Exception as error:  # A template can raise any exception.
        raise UserError(f"{what} fails on {about}: {type(error).__name__}: {str(error)[:200]}") from None
    return "".join(parts)
