"""Reads human preference pairs from files. Each row becomes a Comparison, or is dropped and reported with the reason.

Both dialogues are parsed turn by turn, and their shared context is computed rather than assumed: in the harmless test set of
HH-RLHF, the contexts of 5 of 2,312 rows differ, and 4 chosen answers are empty.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxalign.data.chat.dialogues import Answers, cut_to_fit, is_formatted, parse_pair, split_answers
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.base import CountTokens
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.lazy import read_records
from jaxalign.data.sources.reports import PreferenceReport
from jaxalign.data.sources.rows import data_stem
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Prompt

_GOLD_FIELDS = (("principle", str, "text"), ("kind", str, "text"), ("tie", bool, "true or false"))
"""The optional fields of a gold pair with their types."""


@dataclasses.dataclass(frozen=True)
class PairOptions:
    """How rows are read as pairs: arguments of `read_preferences`."""

    differing_contexts: str = "drop"
    empty_answers: str = "drop"
    count_tokens: CountTokens | None = None
    max_tokens: int | None = None
    margins: bool = False
    gold: bool = False

    def __post_init__(self):
        for name in ("differing_contexts", "empty_answers"):
            if getattr(self, name) not in ("drop", "keep"):
                raise UserError(f"data.{name} is {getattr(self, name)!r}; 'drop' or 'keep' is expected")
        if (self.count_tokens is None) != (self.max_tokens is None):
            raise ValueError("count_tokens and max_tokens must be given together")


@dataclasses.dataclass(frozen=True)
class PairReader:
    """Makes the pair of a row.

    Attributes:
      name: the beginning of each `Prompt.id`.
      source: the `Prompt.source` of all prompts.
      options: how rows are read.
    """

    name: str
    source: str
    options: PairOptions
    reasons = PreferenceReport.reasons
    kept = "pairs"

    def read(self, row: JsonRow | BrokenLine, listed: dict[str, list]) -> Comparison | None:
        """The pair; None for a dropped row. The number of a dropped or changed row is added to the list of its reason."""
        if isinstance(row, BrokenLine):
            listed["broken"].append(row)
            return None
        answers = _answers(row.line, row.value, self.options, listed)
        if answers is None:
            return None
        if is_formatted((*(message.content for message in answers.context), answers.chosen, answers.rejected)):
            listed["formatted"].append(row.line)
        prompt = Prompt(f"{self.name}:{row.line}", answers.context, self.source)
        return _comparison(prompt, answers, row, self.options, listed)


def read_preferences(
    path: str | pathlib.Path,
    *,
    differing_contexts: str = "drop",
    empty_answers: str = "drop",
    max_bad_share: float = 0.01,
    limit: int = 0,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
    source: str = "human",
    margins: bool = False,
    name: str | None = None,
    gold: bool = False,
    columns: Sequence[str] = (),
) -> tuple[Sequence[Comparison], PreferenceReport]:
    """Reads the pairs of rows with `chosen` and `rejected` (see docs/preferences.md).

    Args:
      path: a .jsonl or .jsonl.gz file, or any other data that `open_rows` reads.
      differing_contexts: "drop" rows with differing contexts, or "keep" them: the longest shared context becomes the prompt,
        and the remaining turns the answers.
      empty_answers: "drop" or "keep" rows with an empty chosen or rejected answer.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of pairs; 0 reads all.
      count_tokens: counts the tokens of a context with an answer, encoded as the stage encodes it; None with `max_tokens`.
      max_tokens: the maximum that `count_tokens` may return; the oldest turns of a context are dropped until both answers fit.
      source: the `Prompt.source` of all prompts.
      name: the beginning of each `Prompt.id`; None uses the file's name.
      margins: whether to read each row's "margin", a number of at least 0 by which the chosen answer is better; 0 if missing.
      gold: whether to read the fields of gold pairs too (docs/data_formats.md): a tie has the label 0.5 and is undecided,
        `principles` has the row's principle, and `Prompt.columns` its kind.
      columns: the entries of `config.data.columns`.

    Returns:
      The comparisons in file order, with the chosen answer first and label 1.0, and the report. Those of a table are made when
      they are needed.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, no pair is left, or `margins` is set and no row has
        a margin above 0.
    """
    options = PairOptions(differing_contexts, empty_answers, count_tokens, max_tokens, margins, gold)
    reader = PairReader(name or data_stem(path), source, options)
    uncut = dataclasses.replace(reader, options=dataclasses.replace(options, count_tokens=None, max_tokens=None))
    read = read_records(path, columns, reader, uncut, max_bad_share, limit, counts=lambda pair: bool(pair.margin))
    report = PreferenceReport(str(path), read.rows, len(read.records), **read.lines, unit=read.unit)
    if not read.records:
        raise UserError(f"no pair of answers is left: {'; '.join(report.sentences())}; {report.remedy()}")
    if margins and not read.counted:
        raise UserError(f"no row of {path} has a \"margin\" above 0, and config.preference.margin_weight requires "
                        "margins; set it to 0, or give a file with margins")
    return read.records, report


def _comparison(prompt: Prompt, answers: Answers, row: JsonRow, options: PairOptions, listed: dict[str, list]) -> Comparison:
    """A pair with the row's weight, its margin and its fields of gold pairs."""
    value, margin = row.value, None
    if options.margins:
        margin = value.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
            listed["bad_margins"].append(row.line)
            margin = 0.0
        margin = float(margin)
    weight = 1.0 if value.get("weight") is None else float(value["weight"])
    pair = Comparison(prompt, answers.chosen, answers.rejected, label=1.0, margin=margin, weight=weight)
    if not options.gold:
        return pair
    prompt = dataclasses.replace(prompt, columns={"kind": value["kind"]} if value.get("kind") else {})
    principles = (value["principle"],) if value.get("principle") else ()
    tie = value.get("tie", False)
    return dataclasses.replace(pair, prompt=prompt, principles=principles, label=0.5 if tie else 1.0, decided=not tie)


def _answers(line: int, value: dict[str, Any], options: PairOptions, listed: dict[str, list]) -> Answers | None:
    """The row's answers, and its context, cut until it fits; None for a dropped row, which is listed under its reason."""
    try:
        chosen, rejected = parse_pair(value)
        weight = value.get("weight")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if weight is not None and not (is_number and 0 <= weight < math.inf):
            raise ValueError(f"weight is {str(weight)[:20]!r}; a number of at least 0 is expected")
        for field, kind, expected in _GOLD_FIELDS if options.gold else ():
            if value.get(field) is not None and not isinstance(value[field], kind):
                raise ValueError(f"{field} is {str(value[field])[:20]!r}; {expected} is expected")
    except ValueError as error:
        listed["broken"].append(BrokenLine(line, str(error)))
        return None
    if chosen == rejected:
        listed["identical"].append(line)
        return None
    if chosen[:-1] != rejected[:-1]:
        listed["differing_contexts"].append(line)
        if options.differing_contexts == "drop":
            return None
    answers = split_answers(chosen, rejected)
    if answers is None:
        listed["no_common_question"].append(line)
        return None
    if not answers.context[-1].content.strip():
        listed["empty_prompts"].append(line)
        return None
    if not answers.chosen.strip() or not answers.rejected.strip():
        listed["empty_answers"].append(line)
        if options.empty_answers == "drop":
            return None
    try:
        context = cut_to_fit(answers.context, (answers.chosen, answers.rejected), options.count_tokens, options.max_tokens)
    except DialogueRefused:
        listed["refused"].append(line)
        return None
    if context is None:
        listed["too_long"].append(line)
        return None
    if len(context) < len(answers.context):
        listed["cut"].append(line)
    return answers._replace(context=context)
