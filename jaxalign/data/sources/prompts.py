"""Reads prompts from JSONL, with the columns that a reward reads. Each row becomes a Prompt or is reported as a broken line.

One field of a row is the prompt: text (the user's only turn), or a list of {"role", "content"} that ends with the user's turn.
The other fields, such as "answer", are the prompt's columns.
"""

from __future__ import annotations

import pathlib
from typing import Any

from jaxalign.data.chat.dialogues import parse_messages
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share, file_stem, iterate_jsonl
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt

RESERVED = ("prompt_id", "source", "prompts", "responses")
"""Names that columns must not have, because they are arguments of every reward."""


def read_prompts(
    path: str | pathlib.Path, max_bad_share: float = 0.0, limit: int = 0, field: str = "prompt"
) -> tuple[list[Prompt], list[BrokenLine]]:
    """The prompts of a .jsonl or .jsonl.gz file in order, each distinct dialogue once, and the broken lines.

    Args:
      path: the file.
      max_bad_share: the largest accepted share of broken lines, in [0, 1].
      limit: stop after this number of prompts; 0 reads all.
      field: the name of the field that contains the prompt.

    Returns:
      Prompts with ids "NAME:LINE" and source "file", all with the same columns, and the broken lines.

    Raises:
      UserError: the file is missing or damaged, too many lines are broken, or no prompt is left.
    """
    stem = file_stem(path)
    found: dict[tuple[Message, ...], Prompt] = {}
    broken: list[BrokenLine] = []
    names: set[str] | None = None
    rows = 0
    for row in iterate_jsonl(path):
        rows += 1
        if isinstance(row, BrokenLine):
            broken.append(row)
            continue
        columns = {name: value for name, value in row.value.items() if name != field}
        try:
            messages = _messages(row.value, field)
            _check_columns(columns, names)
        except ValueError as error:
            broken.append(BrokenLine(row.line, str(error)))
            continue
        names = set(columns)
        found.setdefault(messages, Prompt(f"{stem}:{row.line}", messages, "file", columns))
        if limit and len(found) == limit:
            break
    check_bad_share(path, broken, rows, max_bad_share)
    if not found:
        raise UserError(f'{path} has no prompts; each line is an object with "{field}" and the columns the reward reads')
    return list(found.values()), broken


def _messages(value: dict[str, Any], field: str) -> tuple[Message, ...]:
    prompt = value.get(field)
    if isinstance(prompt, str):
        messages = (Message("user", prompt),)
    elif isinstance(prompt, list):
        messages = parse_messages(prompt)
    else:
        raise ValueError(f'no "{field}" that is text or a list of messages')
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the prompt does not end with a non-empty user turn")
    return messages


def _check_columns(columns: dict[str, Any], names: set[str] | None) -> None:
    """Raises ValueError for a reserved column name, or if the names differ from `names`, those of the first prompt."""
    for name in RESERVED:
        if name in columns:
            raise ValueError(f'the column "{name}" is reserved; give it another name')
    if names is not None and set(columns) != names:
        different = sorted(set(columns) ^ names)
        raise ValueError(f"the columns differ from those of the first prompt ({', '.join(different)} in only one of the two)")
