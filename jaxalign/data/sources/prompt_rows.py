"""The dialogue of a prompt in a JSON row, in the layouts of common data sets.

A row is one of:

- a string: the user's only turn;
- an object with the configured prompt field, or with "prompt": a string, a transcript, or a list of {"role", "content"};
- an object with "messages": a list of {"role", "content"};
- an object with "chosen": a transcript or list of messages, as in HH-RLHF and UltraFeedback; with "rejected", the turns that
  both share;
- an object with "question", or with "instruction" and optionally "input", as in Alpaca.

The first field in this order decides, but "chosen" with only the text of an answer comes after "question" and "instruction".
Final assistant turns are removed, so the dialogue ends with a user's turn. A system
turn may come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue, parse_dialogue, parse_messages, parse_pair, parse_transcript, split_answers
from jaxalign.records import Message

_COMMON = ("prompt", "messages", "chosen", "question", "instruction")
"""Fields of common data sets, by priority."""


class PromptRow(NamedTuple):
    """The dialogue of a row, and the names of the fields that it was read from."""

    messages: Dialogue
    fields: tuple[str, ...]


def parse_prompt(value: Any, field: str = "prompt") -> PromptRow:
    """The prompt of a row.

    Args:
        value: a string or an object.
        field: the name of the field that has the prompt, if the row has such a field.

    Raises:
        ValueError: the row has none of these layouts, or its dialogue does not end with a non-empty user turn.
    """
    name = None if isinstance(value, str) else prompt_field(value, field)
    if isinstance(value, str):
        messages, fields = (Message("user", value),), ()
    elif name is None:
        names = ", ".join(f'"{name}"' for name in dict.fromkeys((field, *_COMMON[:-1])))
        raise ValueError(f'no {names} or "instruction"')
    elif name == "chosen" and name != field:
        fields = tuple(each for each in ("chosen", "rejected", "prompt") if each in value)
        messages = _shared(value)
    elif name == "instruction" and name != field:
        text, more = value[name], value.get("input") or ""
        if not isinstance(text, str) or not isinstance(more, str):
            raise ValueError('"instruction" and "input" must be strings')
        fields = ("instruction", "input") if "input" in value else ("instruction",)
        messages = (Message("user", "\n\n".join(part for part in (text, more) if part.strip())),)
    elif isinstance(value[name], list):
        messages, fields = parse_messages(value[name], system=True), (name,)
    elif not isinstance(value[name], str):
        raise ValueError(f'"{name}" is of type {type(value[name]).__name__}; a string or a list of messages is expected')
    elif value[name].startswith("\n\nHuman:"):
        messages, fields = parse_transcript(value[name]), (name,)
    else:
        messages, fields = (Message("user", value[name]),), (name,)
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the prompt does not end with a non-empty user turn")
    return PromptRow(messages, fields)


def prompt_field(value: Mapping[str, Any], field: str = "prompt") -> str | None:
    """The field of an object that `parse_prompt` reads the prompt from; None if there is none."""
    present = [name for name in dict.fromkeys((field, *_COMMON)) if value.get(name) is not None]
    if len(present) > 1 and present[0] == "chosen" != field:
        chosen = value["chosen"]
        if isinstance(chosen, str) and not chosen.lstrip().startswith(("Human:", "Assistant:")):
            return present[1]  # It is the text of an answer instead of a dialogue.
    return present[0] if present else None


def _shared(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue before the answer "chosen"; with "rejected", the turns before the two answers differ."""
    if "rejected" not in row:
        return parse_dialogue(row["chosen"], system=True)
    answers = split_answers(*parse_pair(dict(row), system=True))
    if answers is None:
        raise ValueError('"chosen" and "rejected" have no common user turn that both answer')
    return answers.context
