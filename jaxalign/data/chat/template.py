"""Renders chat templates: Jinja in a sandbox, with the variables and functions that `transformers` provides.

A template is untrusted code. It runs in Jinja's immutable sandbox (no attributes that begin with an underscore, no changes to
its arguments), with limits on loops and output. Any failure becomes a UserError.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxalign.errors import UserError
from jaxalign.records import Message

# Unicode noncharacters, which no text contains. They mark positions in a rendering and are then removed.
CUT, END, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
MARKS = (CUT, END, OPEN, CLOSE)
MAX_TEXT = 10_000_000
"""The maximum number of characters that a template may write."""
MAX_NUMBERS = 1_000_000
"""The maximum total length of all ranges of one rendering."""


class DialogueRefused(UserError):
    """The template refuses this dialogue, for example because roles do not alternate. It may accept other dialogues."""


def render(source: str, origin: str, messages: Sequence[Message], variables: Mapping[str, Any], begin_answer: bool) -> str:
    """The text that the template writes; `{% generation %}` blocks are enclosed in OPEN and CLOSE.

    Args:
        source: the template.
        origin: its file or folder, for error messages.
        messages: the dialogue, with any roles that the template knows.
        variables: additional variables, such as bos_token.
        begin_answer: `add_generation_prompt`: end the text at the beginning of the assistant's next answer.

    Raises:
        DialogueRefused: the template refuses the dialogue.
        UserError: the template is malformed, fails, does something that the sandbox forbids, or writes too much.
    """
    given = {"messages": [{"role": m.role, "content": m.content} for m in messages], "tools": None, "documents": None}
    given |= {"add_generation_prompt": begin_answer, "range": _Ranges(), **variables}
    parts, length = [], 0
    try:
        for part in _compiled(source).generate(given):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise _TooMuch(f"it writes more than {MAX_TEXT} characters")
    except _Refused as error:
        raise DialogueRefused(f"the chat template of {origin} rejects a dialogue ({_roles(messages)}): {error}") from None
    except jinja2.sandbox.SecurityError as error:
        raise UserError(f"the chat template of {origin} does something that the sandbox forbids: {error}; do not use "
                        "it") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template of {origin} is not a Jinja template (line {error.lineno}: {error.message}); "
                        "fix it") from None
    except (_TooMuch, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(f"the chat template of {origin} exceeds a limit: {error or type(error).__name__}; fix it") from None
    except Exception as error:  # A template can raise any exception.
        raise UserError(f"the chat template of {origin} fails on a dialogue ({_roles(messages)}): {type(error).__name__}: "
                        f"{str(error)[:200]}") from None
    return "".join(parts)


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _TooMuch(jinja2.TemplateError):
    """A limit was exceeded."""


class _Ranges:
    """`range` for one rendering, with at most MAX_NUMBERS numbers over all ranges."""

    def __init__(self):
        self.left = MAX_NUMBERS

    def __call__(self, *arguments: int) -> range:
        found = jinja2.sandbox.safe_range(*arguments)
        self.left -= len(found)
        if self.left < 0:
            raise _TooMuch(f"its ranges have more than {MAX_NUMBERS} numbers")
        return found


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the size of repetitions and powers before computing them."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > 64:
            raise _TooMuch(f"it computes a power of {right}")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int) and len(items) * times > MAX_TEXT:
                raise _TooMuch(f"it repeats something {times} times")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the template's own tags around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        return OPEN + caller() + CLOSE


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _roles(messages: Sequence[Message]) -> str:
    shown = ", ".join(str(message.role) for message in messages[:6])
    return f"roles {shown}{', ...' if len(messages) > 6 else ''}"
