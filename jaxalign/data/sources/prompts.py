"""Prompts from JSONL, with the columns that a reward needs: each row is a Prompt, or is counted and told why not.

One field of a row is the prompt: a text (the user's one turn), or a list of {"role", "content"} that ends with the user's turn.
The others (an "answer", say) are the prompt's columns.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

from jaxalign.data.chat.dialogues import parse_messages
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share, iterate_jsonl
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt

RESERVED = ("prompt_id", "source", "prompts", "responses")
"""Names that a reward is called with already."""


def read_prompts(
    path: str | pathlib.Path, max_bad_share: float = 0.0, limit: int = 0, field: str = "prompt"
) -> tuple[list[Prompt], list[BrokenLine]]:
    """The prompts of a .jsonl or .jsonl.gz file in its order, each dialogue once, and the lines that are none.

    Args:
      path: the file.
      max_bad_share: the largest accepted share of broken lines, in [0, 1].
      limit: stop after that many prompts; 0 reads all.
      field: the name of the field that is the prompt.

    Returns:
      Prompts with the id "NAME:LINE" and the source "file". All have the same columns.

    Raises:
      UserError: the file is missing or damaged, too many lines are broken, or no prompt is left.
    """
    stem = pathlib.Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
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
        raise UserError(f'{path} holds no prompts; each line is an object with "{field}" and the columns the reward reads')
    return list(found.values()), broken


def split_prompts(prompts: list[Prompt], held_out_share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out), by a hash of each dialogue, so that the order of the rows plays no part.

    At least one prompt is held out when held_out_share in [0, 1) is above 0. Raises UserError where none is left to learn from.
    """
    def digest(prompt: Prompt) -> bytes:
        text = repr((seed, [(message.role, message.content) for message in prompt.messages]))
        return hashlib.sha256(text.encode("utf-8")).digest()

    count = max(1, round(held_out_share * len(prompts))) if held_out_share > 0 else 0
    if count >= len(prompts):
        raise UserError(f"config.data.held_out_share is {held_out_share:g}, which leaves nothing of {len(prompts)} prompts to "
                        "learn from; lower it or give more prompts")
    held = set(sorted((prompt.id for prompt in prompts), key={p.id: digest(p) for p in prompts}.get)[:count])
    return [p for p in prompts if p.id not in held], [p for p in prompts if p.id in held]


def _messages(value: dict[str, Any], field: str) -> tuple[Message, ...]:
    prompt = value.get(field)
    if isinstance(prompt, str):
        messages = (Message("user", prompt),)
    elif isinstance(prompt, list):
        messages = parse_messages(prompt)
    else:
        raise ValueError(f'no "{field}" that is a text or a list of messages')
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the prompt does not end with a turn of the user's that says something")
    return messages


def _check_columns(columns: dict[str, Any], names: set[str] | None) -> None:
    """Raises ValueError for a reserved name, and where `names`, those of the first prompt, are others."""
    for name in RESERVED:
        if name in columns:
            raise ValueError(f'the column "{name}" is reserved; give it another name')
    if names is not None and set(columns) != names:
        different = sorted(set(columns) ^ names)
        raise ValueError(f"other columns than the first prompt ({', '.join(different)} here or there alone)")
