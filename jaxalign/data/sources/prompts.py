"""Reads prompts from files of several formats. Each row becomes a Prompt or is counted with the reason why it did not.

`prompt_rows` lists the layouts of a row. The fields that are not part of the prompt, such as "answer", are its columns.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share, file_stem
from jaxalign.data.sources.prompt_files import file_rows
from jaxalign.data.sources.prompt_rows import parse_prompt
from jaxalign.data.sources.reports import PromptReport
from jaxalign.errors import UserError
from jaxalign.records import Prompt

RESERVED = ("prompt_id", "source", "prompts", "responses")
"""Names that columns must not have, because they are arguments of every reward."""


class PromptFile(NamedTuple):
    """The prompts of a file, in order, and the report on its rows."""

    prompts: list[Prompt]
    report: PromptReport


def read_prompts(
    path: str | pathlib.Path,
    max_bad_share: float = 0.0,
    limit: int = 0,
    field: str = "prompt",
    name: str = "",
    columns: bool = True,
) -> PromptFile:
    """Reads the prompts of a .jsonl, .json, .csv or .txt file, optionally .gz, each distinct dialogue once.

    Args:
      path: the file; see `prompt_files`. In a .txt file, each non-blank line is a prompt.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of prompts; 0 reads all.
      field: the name of the field that contains the prompt.
      name: the `source` of the prompts and the beginning of their ids; empty: the source "file", and ids with the file's name.
      columns: whether prompts keep the other fields of their rows, which must then be the same in all rows.

    Returns:
      Prompts with ids "NAME:LINE", or "NAME:ITEM" for a JSON array, and the report on the rows.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, or no prompt is left.
    """
    stem, source = name or file_stem(path), name or "file"
    prompts: dict[Dialogue, Prompt] = {}
    broken: list[BrokenLine] = []
    duplicates: list[int] = []
    names: set[str] | None = None
    count = 0
    rows, unit = file_rows(path, field)
    for row in rows:
        count += 1
        if isinstance(row, BrokenLine):
            broken.append(row)
            continue
        try:
            messages, used = parse_prompt(row.value, field)
            kept = {key: value for key, value in row.value.items() if key not in used} if columns and used else {}
            _check_columns(kept, names)
        except ValueError as error:
            broken.append(BrokenLine(row.line, str(error)))
            continue
        names = set(kept)
        if messages in prompts:
            duplicates.append(row.line)
            continue
        prompts[messages] = Prompt(f"{stem}:{row.line}", messages, source, kept)
        if limit and len(prompts) == limit:
            break
    check_bad_share(path, broken, count, max_bad_share, unit)
    if not prompts:
        raise UserError(f'{path} has no prompts; give at least one, such as a row with "{field}" or another field that '
                        "docs/data_formats.md lists")
    report = PromptReport(str(path), count, len(prompts), tuple(broken), tuple(duplicates), unit=unit)
    return PromptFile(list(prompts.values()), report)


def without(file: PromptFile, others: Sequence[Prompt], reason: str) -> PromptFile:
    """The file without the dialogues of the prompts `others`. The field `reason` of its report lists their lines."""
    excluded = {prompt.messages for prompt in others}
    kept = [prompt for prompt in file.prompts if prompt.messages not in excluded]
    lines = tuple(int(prompt.id.rpartition(":")[2]) for prompt in file.prompts if prompt.messages in excluded)
    return PromptFile(kept, dataclasses.replace(file.report, **{reason: lines}))


def _check_columns(columns: dict[str, Any], names: set[str] | None) -> None:
    """Raises ValueError for a reserved column name, or if the names differ from `names`, those of the first prompt."""
    for name in RESERVED:
        if name in columns:
            raise ValueError(f'the column "{name}" is reserved; give it another name')
    if names is not None and set(columns) != names:
        different = sorted(set(columns) ^ names)
        raise ValueError(f"the columns differ from those of the first prompt ({', '.join(different)} in only one of the two)")
