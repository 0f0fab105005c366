"""Renders chat templates: Jinja in a sandbox, with the variables and functions that `transformers` provides.

A template is untrusted code and runs in a sandbox (`sandbox.py`). Any failure becomes a UserError.
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

from jaxalign.data.chat import sandbox
from jaxalign.errors import UserError
from jaxalign.records import Message

# Unicode noncharacters, which no text contains. They mark positions in a rendering and are then removed.
CUT, END, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
MARKS = (CUT, END, OPEN, CLOSE)


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
    arguments = {"messages": [{"role": m.role, "content": m.content} for m in messages], "tools": None, "documents": None}
    arguments |= {"add_generation_prompt": begin_answer, **variables}
    roles = ", ".join(str(message.role) for message in messages[:6])
    name, about = f"the chat template of {origin}", f"a dialogue (roles {roles}{', ...' if len(messages) > 6 else ''})"
    try:
        template = _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{name} is not a Jinja template (line {error.lineno}: {error.message}); fix it") from None
    try:
        return sandbox.run(template, arguments, name, about)
    except sandbox.TemplateRefused as error:
        raise DialogueRefused(f"{name} rejects {about}: {error}") from None


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
    environment = sandbox.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": sandbox.raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
