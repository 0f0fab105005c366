"""The rows of a data source in windows (`config.data.window`), for stages sft, preference and dpo."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxalign import streams
from jaxalign.config import DPOConfig, PreferenceConfig, SFTConfig
from jaxalign.data.sources.window_rows import Record, WindowReport, is_held_out
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import ArrayBuilder, Read, WindowedRows, WindowNotes, WindowOrder
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import print_report
from jaxalign.trainers.windows import windowed_rows

MOST_HELD_OUT = 512
"""The largest number of held-out rows that are measured; those of the first window."""


@dataclasses.dataclass(frozen=True)
class WindowUse:
    """How a stage uses the rows of windows.

    Attributes:
      kind: the kind of the rows: "comparisons", "judgements" or "demonstrations".
      encode: makes the document of a row.
      builder: makes the arrays of documents.
      unit: the name of the rows in sentences.
      limit: the config field with the length to which rows are cut, such as "sft.row_length".
      margins: whether to read the margins of comparisons.
    """

    kind: str
    encode: Callable[[Any], Any]
    builder: ArrayBuilder
    unit: str
    limit: str
    margins: bool = False


def first_rows(context: StageContext, tokenizer: Tokenizer, kind: str, count: int) -> list[Record]:
    """The first `count` rows to train on in the order of the data, for the preview."""
    source, data = sources.open_window_rows(context, tokenizer, kind), context.config.data
    found: list[Record] = []
    for index in range(len(source.rows)):
        if len(found) == count:
            break
        rows = source.records([index], collections.defaultdict(list))
        found += [row for _, row in rows if not is_held_out(row, data.held_out_share, context.config.seed)]
    return found


class Windows:
    """The windows of a stage.

    Args:
      context: the context of the stage.
      tokenizer: the tokenizer of its model.
      use: how the stage uses the rows.

    Attributes:
      rows: the rows to train on; with several members, those of the first one. Close them after training.
      report: the report on the rows that were read so far.
      held_out: the held-out rows of the first window, at most `MOST_HELD_OUT`.
      usable: an estimate of the number of rows to train on.

    Raises:
      UserError: the rows cannot be read, too many rows of the first window are broken, or none can be trained on.
    """

    def __init__(self, context: StageContext, tokenizer: Tokenizer, use: WindowUse):
        self._context, self._use = context, use
        self._source = sources.open_window_rows(context, tokenizer, use.kind, use.margins)
        self.report = WindowReport(self._source, context.config.data.max_bad_share, use.unit)
        self.rows = self.open(0, context.directory)
        try:
            self.held_out = self._first()
        except BaseException:
            self.rows.close()
            raise

    def open(self, number: int, directory: Path) -> WindowedRows:
        """The rows in the order of member `number`, whose directory this is. Only the first member's rows are counted."""
        stream = streams.number_of(self._context.directory.name, streams.LOADERS) + number
        order = WindowOrder(len(self._source.rows), self._context.config.data.window, self._context.stream_seed, stream)

        def count(window: int, notes: WindowNotes) -> None:
            if number == 0 and window < order.windows:  # Later epochs read the same rows again.
                self.report.add(notes)

        return windowed_rows(order, self._read, self._use.builder, directory, count)

    def finish(self) -> dict:
        """Prints the report on all windows, and returns the part of the summary about the data."""
        return print_report(self._context.title, self.report)

    def steps(self, section: SFTConfig | PreferenceConfig | DPOConfig, batch: int) -> int:
        """The number of steps of a section: its own, or an estimate from the first window, which is printed."""
        if section.steps:
            return section.steps
        steps, name = self.rows.steps(section.epochs, batch), self._use.limit.split(".")[0]
        print(f"[{self._context.title}] {steps:,} steps, as many as {name}.epochs={section.epochs} needs if all windows are "
              f"like the first; {name}.steps sets their number", flush=True)
        return steps

    def _first(self) -> list[Record]:
        """Reports on the first window, and returns its held-out rows."""
        data, stage, window, use = self._context.config.data, self._context.title, self.rows.first(), self._use
        notes = window.notes
        if self.report.windows == 1:  # A resumed run has the numbers of more windows.
            print_report(stage, self.report)
        self.usable = round(notes.answers / notes.rows * len(self._source.rows))
        if notes.cut:
            section, field = use.limit.split(".")
            length = getattr(getattr(self._context.config, section), field)
            print(f"[{stage}] warning: {notes.cut:,} answered prompts of the {notes.answers:,} {use.unit} in the first window "
                  f"are cut to {use.limit} ({length} tokens); raise it", flush=True)
        held_out = window.held_out[:MOST_HELD_OUT]
        if data.held_out_share and not held_out:
            print(f"[{stage}] no row of the first window is held out, so no held-out row is measured; raise data.window or "
                  "data.held_out_share", flush=True)
        elif len(held_out) < data.min_held_out and data.held_out_share:
            print(f"[{stage}] {len(held_out)} of the rows of the first window are held out and measured, fewer than "
                  f"data.min_held_out ({data.min_held_out}); raise data.window or data.held_out_share", flush=True)
        return held_out

    def _read(self, index: Sequence[int]) -> Read:
        data, listed = self._context.config.data, {reason: [] for reason in self._source.reader.reasons}
        documents, held_out = [], []
        for number, row in self._source.records(index, listed):
            document = self._use.encode(row)
            if not is_held_out(row, data.held_out_share, self._context.config.seed):
                documents.append((number, document))
            elif self._use.builder.fault(document) is None:
                held_out.append(row)
        return Read(documents, held_out, listed)
