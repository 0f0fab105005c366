"""Prompts for sampling, from the command line or from a file of prompts in any format that training reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, check_bad_share
from jaxalign.data.sources.prompts import file_rows, parse_prompt
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
    rows, unit = file_rows(path)
    prompts, broken = [], []
    for row in rows:
        prompt = _asked(row, f"{path}, {unit} {row.line},")
        (broken if isinstance(prompt, BrokenLine) else prompts).append(prompt)
    check_bad_share(path, broken, len(prompts) + len(broken), 0.0, unit)
    if not prompts:
        raise UserError(f"{path} has no prompts; at least one is expected")
    return prompts


def _asked(row: JsonRow | BrokenLine, place: str) -> Asked | BrokenLine:
    if isinstance(row, BrokenLine):
        return row
    try:
        messages, used = parse_prompt(row.value)
    except ValueError as error:
        return BrokenLine(row.line, str(error))
    if not isinstance(row.value, Mapping):
        return Asked(messages, place, {}, row.value)
    columns = {name: value for name, value in row.value.items() if name not in used}
    if used == ("prompt",):
        return Asked(messages, place, columns, row.value["prompt"])
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return Asked(messages, place, columns, turns if len(turns) > 1 else turns[0]["content"])
