"""Prompts for sampling, from the command line or from a file of prompts in any format that training reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share
from jaxalign.data.sources.prompts import parse_prompt
from jaxalign.data.sources.rows import open_rows
from jaxalign.errors import UserError


class Asked(NamedTuple):
    """One prompt: its dialogue, its location for error messages, the other fields of its row, and the original prompt."""

    messages: Dialogue
    place: str
    columns: dict[str, Any]
    prompt: Any


def read_asked(path: str | Path) -> list[Asked]:
    """The prompts of a file, in order, including duplicates.

    `prompts` lists the formats and the layouts of a row.

    Raises:
        UserError: the file cannot be read, a row has no prompt, or the file has no prompts.
    """
    path = Path(path).expanduser()
    rows = open_rows(path, prompt_field="prompt")
    prompts, broken = [], []
    for row in rows:
        if isinstance(row, BrokenLine):
            broken.append(row)
            continue
        try:
            place = rows.place(row.line) if rows.unit == "row" else f"{rows.path}, {rows.unit} {row.line}"
            prompts.append(_asked(row.value, f"{place},"))
        except ValueError as error:
            broken.append(BrokenLine(row.line, str(error)))
    check_bad_share(path, broken, len(prompts) + len(broken), 0.0, rows.unit, rows.place)
    if not prompts:
        raise UserError(f"{path} has no prompts; at least one is expected")
    return prompts


def _asked(value: Any, place: str) -> Asked:
    """The prompt of a row. Raises ValueError as `parse_prompt` does."""
    messages, used = parse_prompt(value)
    if not isinstance(value, Mapping):
        return Asked(messages, place, {}, value)
    columns = {name: cell for name, cell in value.items() if name not in used}
    if used == ("prompt",):
        return Asked(messages, place, columns, value["prompt"])
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return Asked(messages, place, columns, turns if len(turns) > 1 else turns[0]["content"])
