"""Prompts for sampling, from the command line or from a file of prompts in any format that training reads; and the data of an
evaluation by log-probabilities: plain texts, and questions with several answers."""

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


class Question(NamedTuple):
    """A prompt with several answers. place: its location in error messages; correct: the index of the correct answer."""

    messages: Dialogue
    choices: tuple[str, ...]
    correct: int
    place: str


def read_texts(path: str | Path) -> list[str]:
    """The texts of data that `open_rows` reads: the field "text" of each row, or each non-blank line of a .txt file.

    Raises:
      UserError: the data cannot be read, a row has no text, or there are no texts.
    """
    rows = open_rows(path, prompt_field="text")
    texts, broken = [], []
    for row in rows:
        text = None if isinstance(row, BrokenLine) else row.value.get("text") if isinstance(row.value, Mapping) else row.value
        if isinstance(text, str) and text.strip():
            texts.append(text)
        else:
            reason = row.reason if isinstance(row, BrokenLine) else "the field 'text' is not a text with characters"
            broken.append(BrokenLine(row.line, reason))
    check_bad_share(path, broken, len(texts) + len(broken), 0.0, rows.unit, rows.place)
    if not texts:
        raise UserError(f"{path} has no texts; at least one is expected")
    return texts


def read_questions(path: str | Path) -> list[Question]:
    """The rows {"prompt", "choices": [at least two texts], "correct": index} of a file; "prompt" as in files of prompts.

    Raises:
      UserError: the file cannot be read, a row has another form, or there are no rows.
    """
    return [_question(asked.messages, asked.columns, asked.place) for asked in read_asked(path)]


def _question(messages: Dialogue, columns: Mapping[str, Any], place: str) -> Question:
    choices, correct = columns.get("choices"), columns.get("correct")
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not texts or len(choices) < 2 or len(set(choices)) < len(choices):
        raise UserError(f"{place} choices is {choices!r}; a list of two or more different texts is expected")
    if isinstance(correct, bool) or not isinstance(correct, int) or not 0 <= correct < len(choices):
        raise UserError(f"{place} correct is {correct!r}; the index of one of the {len(choices)} choices, from 0, is expected")
    return Question(messages, tuple(choices), correct, place)
