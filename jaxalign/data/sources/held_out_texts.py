"""The data of an evaluation by log-probabilities: plain texts, and questions with several answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.sources.asked import read_asked
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share
from jaxalign.data.sources.rows import open_rows
from jaxalign.errors import UserError


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
