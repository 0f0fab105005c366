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
    if isinstance(value, str):
        return PromptRow(_ended((Message("user", value),)), ())
    name = _deciding(value, field)
    if name is None:
        names = ", ".join(f'"{name}"' for name in dict.fromkeys((field, *_COMMON[:-1])))
        raise ValueError(f'no {names} or "instruction"')
    given = value[name]
    if name == "chosen" and name != field:
        fields = tuple(each for each in ("chosen", "rejected", "prompt") if each in value)
        return PromptRow(_ended(_shared(value)), fields)
    if name == "instruction" and name != field:
        text, more = given, value.get("input") or ""
        if not isinstance(text, str) or not isinstance(more, str):
            raise ValueError('"instruction" and "input" must be strings')
        fields = ("instruction", "input") if "input" in value else ("instruction",)
        whole = "\n\n".join(part for part in (text, more) if part.strip())
        return PromptRow(_ended((Message("user", whole),)), fields)
    return PromptRow(_ended(_dialogue(given, name)), (name,))


def _deciding(value: Mapping[str, Any], field: str) -> str | None:
    """The field that the prompt is read from."""
    present = [name for name in dict.fromkeys((field, *_COMMON)) if value.get(name) is not None]
    if len(present) > 1 and present[0] == "chosen" != field and _is_answer(value["chosen"]):
        return present[1]
    return present[0] if present else None


def _is_answer(chosen: Any) -> bool:
    """Whether it is the text of an answer instead of a dialogue."""
    return isinstance(chosen, str) and not chosen.lstrip().startswith(("Human:", "Assistant:"))


def is_prompt_row(value: Mapping[str, Any], field: str = "prompt") -> bool:
    """Whether an object has a field that `parse_prompt` reads the prompt from."""
    return _deciding(value, field) is not None


def _dialogue(given: Any, name: str) -> Dialogue:
    if isinstance(given, str):
        return parse_transcript(given) if given.startswith("\n\nHuman:") else (Message("user", given),)
    if isinstance(given, list):
        return parse_messages(given, system=True)
    raise ValueError(f'"{name}" is of type {type(given).__name__}; a string or a list of messages is expected')


def _shared(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue before the answer "chosen"; with "rejected", the turns before the two answers differ."""
    if "rejected" not in row:
        return parse_dialogue(row["chosen"], system=True)
    found = split_answers(*parse_pair(dict(row), system=True))
    if found is None:
        raise ValueError('"chosen" and "rejected" have no common user turn that both answer')
    return found.context


def _ended(messages: Dialogue) -> Dialogue:
    """The dialogue without its final assistant turns."""
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the prompt does not end with a non-empty user turn")
    return messages
