"""Data sources: what `config.data.source` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, load_object

KINDS = ("text", "prompts", "comparisons", "judgements")
"""The kinds of rows: documents to pretrain on, and `jaxalign.records` Prompt, Comparison and Judgement."""


@dataclasses.dataclass(frozen=True)
class DataSourceRecord:
    """A data source: which kinds of rows it has, how they are made, and what the rest of a run needs to know about it.

    `text`, `prompts`, `comparisons` and `judgements` make the rows of one kind each: `function(inputs: SourceInputs)`, or
    "module:attribute" of one, imported when it is first used. It returns a `Split` of two `DataSource`s, or one `DataSource`,
    which is then split by `config.data.held_out_share`. Those types are in `jaxalign.data.sources.base`. None: the source has
    no such rows.

    Attributes:
      name: its name in the config.
      text: makes documents, tuples of segments (`jaxalign.data.chat.formats`), from which a base and its tokenizer are trained.
      prompts: makes `Prompt`s. A source of comparisons or judgements needs none: theirs are used, each dialogue once.
      comparisons: makes `Comparison`s.
      judgements: makes `Judgement`s.
      feedback: the run makes its comparisons itself: stages revise and compare ask its own model about these prompts.
      gold: the gold judge of the embedded world knows the truth about answers to its prompts.
      answers: its prompts have a column with the wanted answer, which a verifier compares with the response.
      patterns: these answers may be patterns for the verifier `regex_match`.
      margins: its comparisons can have margins.
      exact: a run that asks for more prompts than the source has is refused; otherwise it takes all there are.
      alphabet: the characters of its text, each of which becomes a token; empty: a SentencePiece tokenizer of
        `config.world.vocab_size` pieces is trained.
      rows: what the rows of the file `config.data.train` are, for the error where none is named; empty: it reads no file.
      reads: the fields of `config.data` that it reads, of those that not every source reads; None: any. A field that other
        sources read and this one does not is refused unless it has its default.
    """

    name: str
    text: Callable | str | None = None
    prompts: Callable | str | None = None
    comparisons: Callable | str | None = None
    judgements: Callable | str | None = None
    feedback: bool = False
    gold: bool = False
    answers: bool = False
    patterns: bool = False
    margins: bool = False
    exact: bool = False
    alphabet: str = ""
    rows: str = ""
    reads: tuple[str, ...] | None = None

    @property
    def provides(self) -> tuple[str, ...]:
        """The kinds of rows that stages can learn from."""
        found = {kind for kind in KINDS if getattr(self, kind) is not None}
        if "comparisons" in found:
            found.add("prompts")
        if self.feedback:
            found.add("comparisons")
        return tuple(kind for kind in KINDS if kind in found)

    def load(self, kind: str) -> Callable[..., Any]:
        """The function that makes rows of a kind. Raises UserError where the source has none."""
        function = getattr(self, kind)
        if function is None:
            raise UserError(f"config.data.source is {self.name!r}, which provides {', '.join(self.provides) or 'nothing'}; "
                            f"a source of {kind} is needed")
        return load_object(function, f"the {kind} of data source {self.name!r}") if isinstance(function, str) else function


_FILES, _GENERATED = "jaxalign.data.sources.files", "jaxalign.data.sources.generated"
_FILE = ("train", "held_out_share", "max_bad_share", "limit")

DATA_SOURCES = Registry("data source", DataSourceRecord, (
    DataSourceRecord(
        "world", text=f"{_GENERATED}:world_text", prompts=f"{_GENERATED}:world_prompts", feedback=True, gold=True, exact=True,
        reads=(),
    ),
    DataSourceRecord(
        "preferences_jsonl", text=f"{_GENERATED}:world_text", comparisons=f"{_FILES}:comparisons", margins=True,
        rows='dialogues, each row with "chosen" and "rejected"',
        reads=(*_FILE, "extra_train", "weights", "empty_answers", "differing_contexts"),
    ),
    DataSourceRecord(
        "judgements_jsonl", text=f"{_GENERATED}:world_text", judgements=f"{_FILES}:judgements",
        rows='judged answers, each row with "prompt", "completion" and "label"', reads=(*_FILE, "empty_answers"),
    ),
    DataSourceRecord(
        "prompts_jsonl", prompts=f"{_FILES}:prompts", answers=True, patterns=True,
        rows='prompts, each row with "prompt" and the columns that the reward reads', reads=(*_FILE, "prompt_field"),
    ),
    DataSourceRecord(
        "arithmetic", text=f"{_GENERATED}:arithmetic_text", prompts=f"{_GENERATED}:arithmetic_prompts", answers=True,
        alphabet="0123456789+-*", reads=(),
    ),
))


def data_source(config: Any) -> DataSourceRecord:
    """The record that `config.data.source` names. Raises UserError where there is none."""
    return DATA_SOURCES.get(config.data.source, "config.data.source")
