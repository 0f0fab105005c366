"""Runs untrusted Jinja templates: in a sandbox, with limits on loops, powers, repetitions and output.

The limit of the output also holds for text that the template collects before it is written, as in a block or a macro.

The sandbox is Jinja's immutable one: no attributes that begin with an underscore, no changes to the arguments. Chat templates
(`template.py`) and request templates (`requests.py`) both run in it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.sandbox

from jaxalign.errors import UserError

MAX_TEXT = 10_000_000
"""The maximum number of characters that a template may write."""
MAX_BITS = 100_000
"""The maximum size of an integer power, in bits."""
MAX_NUMBERS = 1_000_000
"""The maximum total length of all ranges of one rendering."""


class TemplateRefused(jinja2.TemplateError):
    """The template called raise_exception."""


class _TooMuch(jinja2.TemplateError):
    """A limit was exceeded."""


_counts: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("_counts")
"""Of the current rendering: the "characters" that expressions have written, also into blocks and macros, and the "numbers" of
all ranges."""


def _range(*arguments: int) -> range:
    """`range` with at most MAX_NUMBERS numbers over all ranges of a rendering."""
    numbers = jinja2.sandbox.safe_range(*arguments)
    counts = _counts.get()
    counts["numbers"] += len(numbers)
    if counts["numbers"] > MAX_NUMBERS:
        raise _TooMuch(f"its ranges have more than {MAX_NUMBERS} numbers")
    return numbers


def _count(value: Any) -> Any:
    """Counts the text of an expression before it is written."""
    counts = _counts.get(None)
    if counts is not None:  # None while a template is compiled.
        counts["characters"] += len(value if isinstance(value, str) else str(value))
        _check_length(counts["characters"])
    return value


def _concat(parts: Iterable[str]) -> str:
    """Joins the parts of a block or macro, which may repeat the template's own text."""
    parts = list(parts)
    _check_length(sum(map(len, parts)))
    return "".join(parts)


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise _TooMuch(f"it writes more than {MAX_TEXT} characters")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the size of texts, repetitions and powers before computing them. Takes the arguments of `jinja2.Environment`."""

    concat = staticmethod(_concat)
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, finalize=_count, **more)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(right) > 64 or (isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS)):
            raise _TooMuch(f"it computes a power of {right}")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int) and len(items) * times > MAX_TEXT:
                raise _TooMuch(f"it repeats something {times} times")
        return super().call_binop(context, operator, left, right)


def raise_exception(message: str) -> None:
    """The function of this name that templates may call."""
    raise TemplateRefused(message)


def run(template: jinja2.Template, variables: Mapping[str, Any], name: str, about: str) -> str:
    """The text that a template of an `Environment` writes.

    Args:
        template: the compiled template.
        variables: its variables.
        name: names the template in errors, as in "the chat template of FOLDER".
        about: describes its input in errors, as in "a dialogue (roles user)".

    Raises:
        TemplateRefused: the template called raise_exception.
        UserError: the template fails, does something that the sandbox forbids, or exceeds a limit.
    """
    parts, length = [], 0
    before = _counts.set({"characters": 0, "numbers": 0})
    try:
        for part in template.generate({"range": _range, **variables}):
            parts.append(part)
            length += len(part)
            _check_length(length)
    except TemplateRefused:
        raise
    except jinja2.sandbox.SecurityError as error:
        raise UserError(f"{name} does something that the sandbox forbids: {error}; do not use it") from None
    except (_TooMuch, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(f"{name} exceeds a limit: {error or type(error).__name__}; fix it") from None
    except jinja2.UndefinedError as error:
        words = str(error).replace("jaxalign.records.", "").replace(" object'", "'")
        raise UserError(f"{name} reads a value that does not exist ({words}); correct its name") from None
    except Exception as error:  # A template can raise any exception.
        raise UserError(f"{name} fails on {about}: {type(error).__name__}: {str(error)[:200]}") from None
    finally:
        _counts.reset(before)
    return "".join(parts)
