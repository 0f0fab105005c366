"""Prints token sequences in readable form and marks the tokens that the model is trained on."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 100
GIVEN, LEARNT, SCORED = " ", "^", "*"
"""The mark under a token: given as context, trained on, or the position of a score."""
_COLORS = {GIVEN: "\x1b[0m", LEARNT: "\x1b[32m", SCORED: "\x1b[33m"}
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_BAR = "\u2502"
_VISIBLE = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u2192"}


@dataclasses.dataclass(frozen=True)
class TokenRow:
    """One sequence of tokens, or text without tokens.

    Attributes:
      title: the beginning of the heading.
      ids: the token ids; empty for text without tokens.
      marks: a mark (GIVEN, LEARNT, SCORED) for each id.
      notes: the other parts of the heading.
      lines: lines of text below the tokens.
      tokenizer: the tokenizer of the ids; None: that of the policy.
    """

    title: str
    ids: Sequence[int]
    marks: str
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    tokenizer: Any = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """A token on the screen."""

    token: int
    text: str
    mark: str
    special: bool


def legend(color: bool) -> str:
    """The legend of the marks."""
    marks = {"context": GIVEN, "trained on": LEARNT, "position of the score": SCORED}
    if color:
        shown = ", ".join(f"{_COLORS[mark]}{name}{_PLAIN}" for name, mark in marks.items())
        special = f"{_BOLD}\u00abspecial token\u00bb{_PLAIN}"
    else:
        shown = "no mark: context; ^ trained on; * position of the score"
        special = "\u00abspecial token\u00bb"
    return f"{_BAR} between tokens   \u00b7 space   \u21b5 line break   \u2192 tab   {special}   {shown}"


def cells(row: TokenRow, tokenizer) -> list[Cell]:
    """The row's tokens as cells. `tokenizer` has `piece` and `special_ids`."""
    out = []
    for token, mark in zip(row.ids, row.marks, strict=True):
        special = int(token) in tokenizer.special_ids
        text = visible(tokenizer.piece(int(token)))
        out.append(Cell(int(token), f"\u00ab{text}\u00bb" if special else text or "''", mark, special))
    return out


def visible(text: str) -> str:
    """The text of a token as printable characters. Spaces become dots."""
    return printable(text).replace(" ", _VISIBLE[" "])


def printable(text: str) -> str:
    """The text without control characters, which could affect the terminal. They become symbols or are escaped."""
    return "".join(c if c.isprintable() else _VISIBLE.get(c) or c.encode("unicode_escape").decode() for c in text)


def show(row: TokenRow, tokenizer, color: bool, ids: bool = False) -> str:
    """The row as text: a heading with counts, the tokens and the row's lines.

    tokenizer: used if the row has none of its own. ids: show one token per line, with its position and id.
    """
    shown = cells(row, row.tokenizer or tokenizer)
    learnt, scored = row.marks.count(LEARNT), row.marks.count(SCORED)
    counts = {f"{len(row.ids)} tokens": row.ids, f"{learnt} trained on": learnt, "score at 1": scored}
    counts = [text for text, number in counts.items() if number]
    heading = f"{row.title}: {', '.join([*counts, *row.notes])}"
    if ids:
        lines = [f"{i:6}{cell.token:9}  {cell.mark}  {_colored(cell) if color else cell.text}" for i, cell in enumerate(shown)]
    elif color:
        lines = [f"{_DIM}{_BAR}{_PLAIN}".join(map(_colored, line)) for line in _lines(shown)]
    else:
        lines = []
        for line in _lines(shown):
            under = " ".join(cell.mark * columns(cell.text) for cell in line).rstrip()
            lines += [_BAR.join(cell.text for cell in line), *([under] if under else [])]
    return "\n".join([f"{_BOLD}{heading}{_PLAIN}" if color else heading, *lines, *row.lines])


def _lines(shown: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Splits the cells into lines, after line breaks of the text and at the width of the screen."""
    line, width = [], 0
    for cell in shown:
        size = columns(cell.text) + 1
        if line and width + size > WIDTH:
            yield line
            line, width = [], 0
        line.append(cell)
        width += size
        if cell.text.endswith(_VISIBLE["\n"]):
            yield line
            line, width = [], 0
    if line:
        yield line


def _colored(cell: Cell) -> str:
    return f"{_COLORS[cell.mark]}{_BOLD if cell.special else ''}{cell.text}{_PLAIN}"


def columns(text: str) -> int:
    """The number of terminal columns of a text: two for wide characters, none for combining characters."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
