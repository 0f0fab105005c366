"""Data sources: rows of one kind with a length and random access by index, and operations on the rows of any source:
the checks, the split by dialogue, unique prompts, and cutting to a maximum length.

A source has no position. The rows of batch n are a pure function of (seed, n), see `jaxalign.data.loader`, so a checkpoint
stores only the step n.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxalign.config import Config
from jaxalign.data.chat.dialogues import Dialogue, cut_front, cut_to_fit
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Demonstration, Judgement, Message, Prompt
from jaxalign.registry.custom import kind_and_place

_ANSWERED = {"comparisons": Comparison, "judgements": Judgement, "demonstrations": Demonstration}

RowT = TypeVar("RowT", covariant=True)
Prompted = TypeVar("Prompted", Prompt, Comparison, Judgement, Demonstration)
Answered = TypeVar("Answered", Comparison, Judgement, Demonstration)
CountTokens = Callable[[Dialogue, str], int]
"""Counts the tokens of a context with an answer, encoded as a stage encodes it."""


@runtime_checkable
class DataSource(Protocol[RowT]):
    """Rows of one record type. A list is a data source; a source that reads rows on demand needs only these two methods."""

    def __len__(self) -> int:
        """The number of rows."""

    def __getitem__(self, index: int, /) -> RowT:
        """Row `index` in [0, len). It must be the same row in every call and every process."""


class SourceReport(Protocol):
    """A report on the rows of a file: how many were kept, dropped or changed."""

    def sentences(self) -> list[str]:
        """Lines for the log of a stage."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for the summary of a stage."""


@dataclasses.dataclass(frozen=True)
class Split(Generic[RowT]):
    """The rows of a source.

    Attributes:
      train: the rows to train on.
      held_out: the rows held out for evaluation.
      report: the report on the rows that were read, or None.
      fitted: whether all rows fit the model's maximum length. If not, the stage cuts dialogues at a turn.
      few: a sentence if fewer dialogues than `data.min_held_out` are held out, else "".
    """

    train: DataSource[RowT]
    held_out: DataSource[RowT]
    report: SourceReport | None = None
    fitted: bool = False
    few: str = ""


PURPOSES = ("red_team", "helpful", "compare", "rl", "evaluate")
"""The purposes of prompts: red_team and helpful are read by stage revise, compare by stage compare, rl by the stages that train
on samples of the policy, and evaluate by stage evaluate."""


@dataclasses.dataclass(frozen=True)
class PromptSets:
    """The prompts of a source by purpose.

    Attributes:
      rl: prompts of reinforcement learning, also for best_of_n, online_dpo and reward_distill.
      evaluate: prompts held out for evaluation.
      red_team: prompts whose answers stage revise critiques and revises; None: the source has none.
      helpful: prompts that stage revise answers without a critique; None: the source has none.
      compare: prompts of stage compare; None: those of `rl`.
      reports: the reports on the files that were read.
      fitted, few: as in `Split`.
    """

    rl: DataSource[Prompt]
    evaluate: DataSource[Prompt]
    red_team: DataSource[Prompt] | None = None
    helpful: DataSource[Prompt] | None = None
    compare: DataSource[Prompt] | None = None
    reports: tuple[SourceReport, ...] = ()
    fitted: bool = False
    few: str = ""

    def of(self, purpose: str) -> DataSource[Prompt] | None:
        """The prompts of one of `PURPOSES`."""
        return self.rl if purpose == "compare" and self.compare is None else getattr(self, purpose)


@dataclasses.dataclass(frozen=True)
class SourceInputs:
    """The argument of a data source's functions.

    Attributes:
      config: the whole config.
      count_tokens: counts the tokens of a context with an answer, to cut dialogues; None for text and prompts.
      max_tokens: the maximum that `count_tokens` may return; None if `count_tokens` is None.
      margins: whether to read the margins of comparisons.
    """

    config: Config
    count_tokens: CountTokens | None = None
    max_tokens: int | None = None
    margins: bool = False


def read_rows(source: Any, kind: str, where: str, count: int | None = None, keep_empty: bool = False) -> list[Any]:
    """Reads the rows of a source into a list and checks each row.

    Args:
      source: a `DataSource`.
      kind: "prompts", "comparisons", "judgements", "demonstrations" or "text".
      where: the origin of the source for error messages, such as "config.data.source 'FILE.py:name'".
      count: read rows [0, count); None reads all.
      keep_empty: whether answers may be empty.

    Raises:
      UserError: the source has no length or index, reading a row fails, or a row is invalid (such as the wrong type, empty
        text, or a repeated id).
    """
    if not isinstance(source, DataSource) or isinstance(source, (str, bytes, dict)):
        raise UserError(f"{where} gives {kind} of type {type(source).__name__}; an object with a length and an index from 0, "
                        "such as a list, is expected")
    rows, ids = [], set()
    try:
        length = len(source) if count is None else min(count, len(source))
    except Exception as error:  # The user's code may raise anything.
        raise UserError(f"{where}: len() of its {kind} raised {kind_and_place(error)}: {error}") from error
    for index in range(length):
        try:
            row = source[index]
        except Exception as error:
            raise UserError(f"{where}: reading row {index} of its {length} {kind} raised {kind_and_place(error)}: "
                            f"{error}") from error
        fault = row_fault(row, kind, keep_empty)
        if fault is None and isinstance(row, Prompt):
            fault = f"has the id {row.id!r} of an earlier row; ids must differ" if row.id in ids else None
            ids.add(row.id)
        if fault is not None:
            raise UserError(f"{where}: row {index} of its {kind} {fault}")
        rows.append(row)
    return rows


def row_fault(row: Any, kind: str, keep_empty: bool) -> str | None:
    """What is wrong with a row, as the end of a sentence; None if it is valid. The arguments are those of `read_rows`."""
    if kind == "text":
        if isinstance(row, tuple) and row and all(isinstance(segment, str) for segment in row):
            return None
        return f"is {str(row)[:40]!r}; a tuple of strings, the segments of a document, is expected"
    if kind == "prompts":
        return _prompt_fault(row)
    record = _ANSWERED[kind]
    if not isinstance(row, record):
        return f"is of type {type(row).__name__}; a jaxalign.records.{record.__name__} is expected"
    fault = _prompt_fault(row.prompt)
    if fault is not None:
        return f"has a prompt that {fault}"
    for name in ("response",) if record is not Comparison else ("response_a", "response_b"):
        answer = getattr(row, name)
        if not isinstance(answer, str):
            return f"has the {name} {str(answer)[:40]!r}; a string is expected"
        if not keep_empty and not answer.strip():
            return f"has the {name} {answer!r}; non-empty text is expected unless config.data.empty_answers is 'keep'"
    if record is Demonstration:
        return None
    if record is Judgement:
        label = row.desirable
        return None if isinstance(label, bool) else f"has the label desirable={label!r}; True or False is expected"
    if row.response_a == row.response_b:
        return f"has two equal answers, {row.response_a[:40]!r}, so it teaches nothing; leave the row out"
    label, margin = row.label, row.margin
    if isinstance(label, bool) or not isinstance(label, (int, float)) or not 0 <= label <= 1:
        return f"has the label {label!r}; the probability in [0, 1] that response_a is the better one is expected"
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if margin is not None and not (is_number and 0 <= margin < math.inf):
        return f"has the margin {margin!r}; None or a finite number of at least 0 is expected"
    return None


def _prompt_fault(row: Any) -> str | None:
    if not isinstance(row, Prompt):
        return f"is of type {type(row).__name__}; a jaxalign.records.Prompt is expected"
    if not isinstance(row.messages, tuple) or not all(isinstance(message, Message) for message in row.messages):
        return "has messages that are not a tuple of jaxalign.records.Message"
    if not row.messages or row.messages[-1].role != "user" or not str(row.messages[-1].content).strip():
        return "does not end with a non-empty user message"
    if not all(isinstance(message.content, str) for message in row.messages):
        return "has a message with content that is not a string"
    return None


class FittedPrompts(NamedTuple):
    """The prompts that fit, and the ids of prompts that were cut or dropped.

    Attributes:
      prompts: the prompts that fit, cut at a turn if needed.
      cut: ids of prompts that lost their oldest turns.
      too_long: ids of prompts that do not fit even with only their last turn.
      refused: ids of prompts that the chat template or the style refuses.
      reason: the reason for the first of them.
    """

    prompts: list[Prompt]
    cut: tuple[str, ...]
    too_long: tuple[str, ...]
    refused: tuple[str, ...]
    reason: str = ""


def fit_prompts(prompts: Sequence[Prompt], count_tokens: Callable[[Dialogue], int], max_tokens: int) -> FittedPrompts:
    """Cuts each prompt at a turn, oldest turns first, until `count_tokens` of its messages is at most `max_tokens`."""
    fitted, cut, too_long, refused, reason = [], [], [], [], ""
    for prompt in prompts:
        try:
            context = cut_front(prompt.messages, lambda messages: count_tokens(messages) <= max_tokens)
        except DialogueRefused as error:
            refused.append(prompt.id)
            reason = reason or str(error)
            continue
        if context is None:
            too_long.append(prompt.id)
            continue
        if len(context) < len(prompt.messages):
            cut.append(prompt.id)
        fitted.append(dataclasses.replace(prompt, messages=context))
    return FittedPrompts(fitted, tuple(cut), tuple(too_long), tuple(refused), reason)


def fit_answered(
    rows: Sequence[Answered], count_tokens: Callable[[Dialogue, str], int], max_tokens: int
) -> tuple[list[Answered], int, int]:
    """Cuts the dialogue of each row at a turn, oldest turns first, until it fits with each of the row's answers.

    Returns:
      The rows that fit, the number of dropped rows (too long even with only the last turn, or refused by the template), and
      the number of the other rows that lost turns.
    """
    fitted, cut = [], 0
    for row in rows:
        answers = (row.response,) if isinstance(row, Demonstration) else (row.response_a, row.response_b)
        try:
            context = cut_to_fit(row.prompt.messages, answers, count_tokens, max_tokens)
        except DialogueRefused:
            context = None
        if context is not None:
            cut += len(context) < len(row.prompt.messages)
            fitted.append(dataclasses.replace(row, prompt=dataclasses.replace(row.prompt, messages=context)))
    return fitted, len(rows) - len(fitted), cut


def unique_prompts(rows: Sequence[Answered]) -> list[Prompt]:
    """The prompts of comparisons or judgements in order, with only the first prompt of each distinct dialogue."""
    seen: dict[Dialogue, Prompt] = {}
    for row in rows:
        seen.setdefault(row.prompt.messages, row.prompt)
    return list(seen.values())


_MOST = 5
"""To reach a minimum number, at most one of so many dialogues is held out."""


def held_out_count(total: int, count: int, minimum: int) -> int:
    """The number of `total` rows to hold out: `count`, or more to reach `minimum`, as long as that is at most a fifth."""
    return max(count, min(minimum, total // _MOST))


def few_held_out(total: int, held_out: int, minimum: int, rows: str = "dialogues") -> str:
    """A sentence if fewer rows than `minimum` are held out, else "". rows: the name of the rows."""
    if not 0 < held_out < minimum:
        return ""
    held = f"1 {rows[:-1]} is" if held_out == 1 else f"{held_out} {rows} are"
    return f"{held} held out of {total}: data.min_held_out is {minimum}, but it raises the number to at most a fifth"


def split_by_prompt(
    rows: Sequence[Prompted], held_out_share: float, seed: int = 0, minimum: int = 0, *, where: str = "the rows",
    field: str = "held_out_share",
) -> tuple[list[Prompted], list[Prompted]]:
    """Splits rows into (train, held out) so that no dialogue is in both; independent of the order of the rows.

    Args:
      rows: prompts, comparisons or judgements. Parts of `LazyRecords` are such records too.
      held_out_share: the fraction of distinct dialogues to hold out, in [0, 1); at least one dialogue if it is above 0.
      seed: selects the split.
      minimum: the minimum number of dialogues to hold out if the share is above 0; see `held_out_count`.
      where, field: the origin of the rows and the name of the share, for error messages.

    Raises:
      UserError: nothing would be left to train on.
    """
    digests = dialogue_digests(rows, seed)
    distinct = np.unique(digests)
    total = len(distinct)
    count = held_out_count(total, max(1, round(held_out_share * total)), minimum) if held_out_share > 0 else 0
    if count >= total:
        dialogues = "1 distinct dialogue" if total == 1 else f"{total} distinct dialogues"
        raise UserError(f"{where}: {field} is {held_out_share:g}, which leaves none of {dialogues} to train on; "
                        f"{'set it to 0' if total == 1 else 'lower it'}, or give more rows")
    held = np.isin(digests, distinct[:count])
    if isinstance(rows, LazyRecords):
        return rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))
    pairs = list(zip(rows, held.tolist(), strict=True))
    return [row for row, out in pairs if not out], [row for row, out in pairs if out]


def split_rows(
    config: Config, rows: Sequence[Prompted], where: str, report: SourceReport | None = None, fitted: bool = False
) -> Split:
    """The rows of files, split by `config.data`. where: their origin for error messages. The others are fields of `Split`."""
    data, field = config.data, "config.data.held_out_share"
    parts = split_by_prompt(rows, data.held_out_share, config.seed, data.min_held_out, where=where, field=field)
    return Split(*parts, report, fitted, few_dialogues(*parts, data.min_held_out))


def few_dialogues(train: Sequence[Prompted], held_out: Sequence[Prompted], minimum: int) -> str:
    """`few_held_out` for the distinct dialogues of a split."""
    held = len(np.unique(dialogue_digests(held_out)))
    if not 0 < held < minimum:
        return ""  # Without the pass over the training rows.
    return few_held_out(held + len(np.unique(dialogue_digests(train))), held, minimum)


def dialogue_digests(rows: Sequence[Prompted], seed: int = 0) -> np.ndarray:
    """The first 64 bits of a hash of the seed and each row's dialogue, uint64."""
    return np.fromiter((dialogue_digest(row, seed) for row in rows), np.uint64, len(rows))


def dialogue_digest(row: Prompted, seed: int = 0) -> int:
    """The first 64 bits of a hash of the seed and a row's dialogue."""
    messages = row.messages if isinstance(row, Prompt) else row.prompt.messages
    text = repr((seed, [(message.role, message.content) for message in messages]))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
