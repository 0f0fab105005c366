"""Renders chat templates: Jinja in a sandbox, with the variables and functions that `transformers` provides.

A template is untrusted code: it runs in a sandbox (`sandbox.py`), in a process of its own. Any failure becomes a UserError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.data.chat import sandbox, template_process
from jaxalign.data.chat.sandbox import CLOSE, OPEN
from jaxalign.errors import UserError
from jaxalign.records import Message

# Unicode noncharacters, as OPEN and CLOSE. They mark positions in a rendering and are then removed.
CUT, END = "\ufdd0", "\ufdd1"
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
        UserError: the template is malformed, fails, does something that the sandbox forbids, or exceeds a limit.
    """
    arguments = {"messages": [{"role": m.role, "content": m.content} for m in messages], "tools": None, "documents": None}
    arguments |= {"add_generation_prompt": begin_answer, **variables}
    roles = ", ".join(str(message.role) for message in messages[:6])
    name, about = f"the chat template of {origin}", f"a dialogue (roles {roles}{', ...' if len(messages) > 6 else ''})"
    return run("chat", source, arguments, name, about)["text"]


def run(
    dialect: str, source: str, variables: Mapping[str, Any] | None, name: str, about: str, trusted: bool = False
) -> dict[str, Any]:
    """Renders a template, or finds its variables.

    Args:
        dialect: "chat" or "request".
        source: the template.
        variables: its variables; None to find their names instead.
        name: names the template in errors, as in "the chat template of FOLDER".
        about: describes its input in errors, as in "a dialogue (roles user)".
        trusted: whether it belongs to jaxalign; it is then rendered in this process.

    Returns:
        "text" and "turns" of the rendering, or "names", the variables that the template reads (`sandbox.answer`).

    Raises:
        DialogueRefused: the template called raise_exception.
        UserError: the template is malformed, fails, does something that the sandbox forbids, or exceeds a limit.
    """
    answer = sandbox.answer if trusted else template_process.ask
    reply = answer(dialect=dialect, source=source, variables=variables, about=about)
    if "refused" in reply:
        raise DialogueRefused(f"{name} rejects {about}: {reply['refused']}")
    if "fault" in reply:
        raise UserError(f"{name} {reply['fault']}")
    return reply
