"""Data sources: the records that `config.data.source` selects from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Record, Registry

KINDS = ("text", "prompts", "comparisons", "judgements", "demonstrations")
"""The kinds of rows: documents to pretrain on, and `jaxalign.records` Prompt, Comparison, Judgement and Demonstration."""


@dataclasses.dataclass(frozen=True)
class DataSourceRecord(Record):
    """A data source: the kinds of rows that it provides, the functions that build them, and its properties.

    `text`, `prompts`, `comparisons`, `judgements` and `demonstrations` each build rows of one kind: `function(inputs:
    SourceInputs)`, or "module:attribute" of such a function, imported on first use. It returns a `Split` of two
    `DataSource`s, or a single `DataSource` to be split by `config.data.held_out_share` (both types are in
    `jaxalign.data.sources.base`). None: the source has no such rows.

    Attributes:
      name: its name in the config.
      text: builds documents, tuples of segments (`jaxalign.data.chat.formats`), that train the base model and its tokenizer.
      prompts: builds `Prompt`s; it may also return `PromptSets` with the prompts by purpose. Not needed with comparisons,
        judgements or demonstrations: their distinct dialogues are the prompts.
      comparisons: builds `Comparison`s.
      judgements: builds `Judgement`s.
      demonstrations: builds `Demonstration`s, answers that stage sft imitates.
      feedback: stages revise and compare make its comparisons, and its text teaches the base model to judge in compact markers.
      gold: the gold judge of the embedded world can judge answers to its prompts.
      answers: its prompts have a column with the expected answer, which a verifier compares with the response.
      patterns: these answers may be patterns for the verifier `regex_match`.
      margins: its comparisons can have margins.
      exact: a run that asks for more prompts than the source has fails; if False, it uses all of its prompts.
      alphabet: the characters of its text, each of which becomes a token; empty: train a SentencePiece tokenizer with
        `config.world.vocab_size` pieces.
      rows: a description of the rows of its files, for the error if `config.data` names no file; empty: it reads no file.
      reads: the fields of `config.data` that it reads, among those that not every source reads; None: any. A field that other
        sources read but this one does not must keep its default.
      world: the fields of `config.world` that it reads, with the same meaning of None.
      windows: `function(inputs: SourceInputs, kind) -> WindowRows`, or "module:attribute" of it: opens the comparisons,
        judgements or demonstrations by index for `config.data.window`; empty: it has no such rows. A source whose `prompts`
        function reads only a window has "window" in `reads`.
      world_rows: it reads `config.world` for rows of other kinds than text; if False, only `model.source=scratch` reads them.
    """

    name: str
    text: Callable | str | None = None
    prompts: Callable | str | None = None
    comparisons: Callable | str | None = None
    judgements: Callable | str | None = None
    demonstrations: Callable | str | None = None
    feedback: bool = False
    gold: bool = False
    answers: bool = False
    patterns: bool = False
    margins: bool = False
    exact: bool = False
    alphabet: str = ""
    rows: str = ""
    reads: tuple[str, ...] | None = None
    world: tuple[str, ...] | None = None
    world_rows: bool = True
    windows: Callable | str = ""

    @property
    def provides(self) -> tuple[str, ...]:
        """The kinds of rows that stages can train on, including rows derived from others."""
        kinds = {kind for kind in KINDS if getattr(self, kind) is not None}
        if kinds & {"comparisons", "demonstrations"}:
            kinds.add("prompts")
        if self.feedback:
            kinds.add("comparisons")
        return tuple(kind for kind in KINDS if kind in kinds)

    _where = "the {part} of data source {name!r}"

    def load(self, part: str = "prompts") -> Callable[..., Any]:
        """The function that builds rows of a kind, which is its field.

        Raises:
          UserError: the source has no such rows, or the function cannot be imported.
        """
        function = super().load(part)
        if function is None:
            raise UserError(f"config.data.source is {self.name!r}, which provides {', '.join(self.provides) or 'nothing'}; "
                            f"a source of {part} is needed")
        return function


_FILES, _GENERATED = "jaxalign.data.sources.files", "jaxalign.data.sources.generated"
_FILE = ("train", "columns", "held_out_share", "max_bad_share", "limit", "window")
PROMPT_FILES = ("red_team", "helpful", "rl", "eval")
"""The fields of `config.data` that name files of prompts; `train` is another name of `rl`."""

DATA_SOURCES = Registry("data source", DataSourceRecord, (
    DataSourceRecord(
        "world", text=f"{_GENERATED}:world_text", prompts=f"{_GENERATED}:world_prompts", feedback=True, gold=True, exact=True,
        reads=(),
    ),
    DataSourceRecord(
        "preferences_jsonl", text=f"{_GENERATED}:world_text", comparisons=f"{_FILES}:comparisons", margins=True,
        rows='dialogues, each row with "chosen" and "rejected"',
        reads=(*_FILE, "extra_train", "weights", "empty_answers", "differing_contexts"), world_rows=False,
        windows=f"{_FILES}:window_rows",
    ),
    DataSourceRecord(
        "judgements_jsonl", text=f"{_GENERATED}:world_text", judgements=f"{_FILES}:judgements",
        rows='judged answers, each row with "prompt", "completion" and "label"', reads=(*_FILE, "empty_answers"),
        world_rows=False, windows=f"{_FILES}:window_rows",
    ),
    DataSourceRecord(
        "messages_jsonl", text=f"{_GENERATED}:world_text", demonstrations=f"{_FILES}:demonstrations",
        rows='answered dialogues, each row with "messages" that end with the answer', reads=(*_FILE, "empty_answers"),
        world_rows=False, windows=f"{_FILES}:window_rows",
    ),
    DataSourceRecord(
        "prompts_jsonl", prompts="jaxalign.data.sources.prompts:prompts", answers=True, patterns=True,
        rows='prompts, each row with "prompt" and the columns that the reward reads',
        reads=(*_FILE, *PROMPT_FILES, "prompt_field"), world=(), world_rows=False,
    ),
    DataSourceRecord(
        "arithmetic", text=f"{_GENERATED}:arithmetic_text", prompts=f"{_GENERATED}:arithmetic_prompts", answers=True,
        alphabet="0123456789+-*", reads=(), world=(), world_rows=False,
    ),
))


def data_source(config: Any) -> DataSourceRecord:
    """The record selected by `config.data.source`. Raises UserError if there is none."""
    return DATA_SOURCES.get(config.data.source, "config.data.source")
