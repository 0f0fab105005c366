"""Prompts for sampling, from the command line, a text file with one prompt per line, or JSONL."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue, parse_messages
from jaxalign.data.sources.jsonl import BrokenLine, Row, check_bad_share, iterate_jsonl
from jaxalign.errors import UserError
from jaxalign.records import Message


class Asked(NamedTuple):
    """One prompt: its dialogue, its location for error messages, the other fields of its row, and the original prompt."""

    messages: Dialogue
    place: str
    columns: dict[str, Any]
    prompt: Any


def one_prompt(text: str) -> Asked:
    """A prompt from the command line."""
    return Asked((Message("user", text),), "--prompt", {}, text)


def read_asked(path: str | Path) -> list[Asked]:
    """The prompts of a file, in order, including duplicates.

    Each row of a .jsonl or .jsonl.gz file has a "prompt": text, or a list of {"role", "content"} that ends with the user's
    message. In any other file, each non-blank line is a prompt.

    Raises:
        UserError: the file cannot be read, a row has no prompt, or the file has no prompts.
    """
    path = Path(path).expanduser()
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = [_row(path, row) for row in iterate_jsonl(path)]
        check_bad_share(path, [row for row in rows if isinstance(row, BrokenLine)], len(rows), 0.0)
        found = [row for row in rows if isinstance(row, Asked)]
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); give a text file or a .jsonl file") from None
        numbered = enumerate((line.rstrip("\r") for line in lines), start=1)
        found = [Asked((Message("user", line),), f"{path}, line {number},", {}, line)
                 for number, line in numbered if line.strip()]
    if not found:
        raise UserError(f"{path} has no prompts; one per line is expected")
    return found


def _row(path: Path, row: Row | BrokenLine) -> Asked | BrokenLine:
    if isinstance(row, BrokenLine):
        return row
    prompt, place = row.value.get("prompt"), f"{path}, line {row.line},"
    columns = {name: value for name, value in row.value.items() if name != "prompt"}
    if isinstance(prompt, str) and prompt.strip():
        return Asked((Message("user", prompt),), place, columns, prompt)
    try:
        messages = parse_messages(prompt) if isinstance(prompt, list) else ()
    except ValueError as error:
        return BrokenLine(row.line, str(error))
    if not messages or messages[-1].role != "user":
        return BrokenLine(row.line, 'no "prompt" that is text or a list of messages ending with a user message')
    return Asked(messages, place, columns, prompt)
