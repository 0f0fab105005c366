"""Reads prompts from JSONL or plain text. Each row becomes a Prompt or is counted with the reason why it did not.

`prompt_rows` lists the layouts of a row. The fields that are not part of the prompt, such as "answer", are its columns.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.sources.jsonl import BrokenLine, Row, check_bad_share, file_stem, iterate_jsonl
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
    """Reads the prompts of a .jsonl, .jsonl.gz or .txt file, each distinct dialogue once.

    Args:
      path: the file. In a .txt file, each non-blank line is a prompt.
      max_bad_share: the largest accepted share of broken lines, in [0, 1].
      limit: stop after this number of prompts; 0 reads all.
      field: the name of the field that contains the prompt.
      name: the `source` of the prompts and the beginning of their ids; empty: the source "file", and ids with the file's name.
      columns: whether prompts keep the other fields of their rows, which must then be the same in all rows.

    Returns:
      Prompts with ids "NAME:LINE", and the report on the rows.

    Raises:
      UserError: the file is missing or damaged, too many lines are broken, or no prompt is left.
    """
    stem, source = name or file_stem(path), name or "file"
    found: dict[Dialogue, Prompt] = {}
    broken: list[BrokenLine] = []
    duplicates: list[int] = []
    names: set[str] | None = None
    count = 0
    for row in _rows(path):
        count += 1
        if isinstance(row, BrokenLine):
            broken.append(row)
            continue
        try:
            messages, used = parse_prompt(row.value, field)
            own = {key: value for key, value in row.value.items() if key not in used} if columns and used else {}
            _check_columns(own, names)
        except ValueError as error:
            broken.append(BrokenLine(row.line, str(error)))
            continue
        names = set(own)
        if messages in found:
            duplicates.append(row.line)
            continue
        found[messages] = Prompt(f"{stem}:{row.line}", messages, source, own)
        if limit and len(found) == limit:
            break
    check_bad_share(path, broken, count, max_bad_share)
    if not found:
        raise UserError(f'{path} has no prompts; each line is an object with "{field}" or another field that '
                        "docs/data_formats.md lists, and the columns that the reward reads")
    report = PromptReport(str(path), count, len(found), tuple(broken), tuple(duplicates))
    return PromptFile(list(found.values()), report)


def without(file: PromptFile, others: Sequence[Prompt], reason: str) -> PromptFile:
    """The file without the dialogues of the prompts `others`. The field `reason` of its report lists their lines."""
    excluded = {prompt.messages for prompt in others}
    kept = [prompt for prompt in file.prompts if prompt.messages not in excluded]
    lines = tuple(int(prompt.id.rpartition(":")[2]) for prompt in file.prompts if prompt.messages in excluded)
    return PromptFile(kept, dataclasses.replace(file.report, **{reason: lines}))


def _rows(path: str | pathlib.Path) -> Iterator[Row | BrokenLine]:
    """The rows of a file, each with an object or a string."""
    if pathlib.Path(path).suffix.lower() != ".txt":
        yield from iterate_jsonl(path, strings=True)
        return
    try:
        lines = pathlib.Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"the file {path} does not exist; give the path of a .txt, .jsonl or .jsonl.gz file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a text file in UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Row(number, line.rstrip("\r"))


def _check_columns(columns: dict[str, Any], names: set[str] | None) -> None:
    """Raises ValueError for a reserved column name, or if the names differ from `names`, those of the first prompt."""
    for name in RESERVED:
        if name in columns:
            raise ValueError(f'the column "{name}" is reserved; give it another name')
    if names is not None and set(columns) != names:
        different = sorted(set(columns) ^ names)
        raise ValueError(f"the columns differ from those of the first prompt ({', '.join(different)} in only one of the two)")
