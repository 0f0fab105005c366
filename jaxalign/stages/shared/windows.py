"""The rows of a data source in windows (`config.data.window`), for stage sft."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from jaxalign import streams
from jaxalign.data.chat import styles
from jaxalign.data.packing import loses_answer, pack
from jaxalign.data.sources.base import SourceInputs
from jaxalign.data.sources.window_rows import Record, WindowReport, WindowRows, is_held_out
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import Document, Read, WindowedRows, WindowNotes, WindowOrder
from jaxalign.records import Demonstration, Message, PackedBatch
from jaxalign.registry.data_sources import data_source
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import print_report, warn_about_few
from jaxalign.trainers.windows import windowed_rows

MOST_HELD_OUT = 512
"""The largest number of held-out answers on which the loss is measured; those of the first window."""


def open_window_rows(context: StageContext, tokenizer: Tokenizer) -> WindowRows:
    """The rows by index that stage sft trains on. Raises UserError if the data is missing or cannot be read by index."""
    config, record = context.config, data_source(context.config)
    kind = "demonstrations" if "demonstrations" in record.provides else "comparisons"
    most = config.model.max_length
    if kind == "comparisons":
        most = min(config.preference.max_length, most)
    return record.load("windows")(SourceInputs(config, sources.token_counter(tokenizer, config), most), kind)


def answer_of(row: Record) -> tuple[Sequence[Message], str]:
    """The dialogue and the answer to imitate."""
    return row.prompt.messages, row.response if isinstance(row, Demonstration) else row.response_a


def first_answers(context: StageContext, tokenizer: Tokenizer, count: int) -> list[tuple[Sequence[Message], str]]:
    """The first `count` answers to imitate in the order of the data, for the preview."""
    source, data = open_window_rows(context, tokenizer), context.config.data
    answers = []
    for index in range(len(source.rows)):
        if len(answers) == count:
            break
        rows = source.records([index], collections.defaultdict(list))
        answers += [answer_of(row) for _, row in rows if not is_held_out(row, data.held_out_share, context.config.seed)]
    return answers


class Windows:
    """The windows of stage sft.

    Args:
      context: the context of the stage.
      tokenizer: the tokenizer of its model.

    Attributes:
      rows: the packed rows to train on. Close them after training.
      report: the report on the rows that were read so far.
      held_out: the packed held-out rows of the first window; None if there are none.

    Raises:
      UserError: the rows cannot be read, too many rows of the first window are broken, or none can be trained on.
    """

    def __init__(self, context: StageContext, tokenizer: Tokenizer):
        config, section = context.config, context.config.sft
        self._context, self._tokenizer = context, tokenizer
        self._source = open_window_rows(context, tokenizer)
        self.report = WindowReport(self._source, config.data.max_bad_share)
        stream = streams.number_of(context.directory.name, streams.LOADERS)
        self._order = WindowOrder(len(self._source.rows), config.data.window, context.stream_seed, stream)
        self.rows: WindowedRows = windowed_rows(self._order, self._read, section.row_length, context.directory, self._count)
        try:
            self.held_out = self._first()
        except BaseException:
            self.rows.close()
            raise

    def finish(self) -> dict:
        """Prints the report on all windows, and returns the part of the summary about the data."""
        return print_report(self._context.title, self.report) | {"answers": self.report.answers, "cut": self.report.cut_rows}

    def _first(self) -> PackedBatch | None:
        """Reports on the first window, and returns its held-out rows."""
        config, stage, window = self._context.config, self._context.title, self.rows.first()
        notes, section = window.notes, config.sft
        if self.report.windows == 1:  # A resumed run has the numbers of more windows.
            print_report(stage, self.report)
        usable = round(notes.answers / notes.rows * self._order.rows)
        warn_about_few(stage, section, usable, usable)
        if notes.cut:
            print(f"[{stage}] warning: {notes.cut:,} of the {notes.answers:,} answered prompts of the first window are cut to "
                  f"sft.row_length ({section.row_length} tokens); raise it", flush=True)
        held_out = window.held_out[:MOST_HELD_OUT]
        if config.data.held_out_share and not held_out:
            print(f"[{stage}] no row of the first window is held out, so the held-out loss is not measured; raise data.window "
                  "or data.held_out_share", flush=True)
        elif len(held_out) < config.data.min_held_out and config.data.held_out_share:
            print(f"[{stage}] the held-out loss is measured on {len(held_out)} of the rows of the first window, fewer than "
                  f"data.min_held_out ({config.data.min_held_out}); raise data.window or data.held_out_share", flush=True)
        return pack(held_out, section.row_length)[0] if held_out else None

    def _count(self, number: int, notes: WindowNotes) -> None:
        if number < self._order.windows:  # Later epochs read the same rows again.
            self.report.add(notes)

    def _read(self, index: Sequence[int]) -> Read:
        data, listed = self._context.config.data, {reason: [] for reason in self._source.reader.reasons}
        length = self._context.config.sft.row_length
        documents, held_out = [], []
        for number, row in self._source.records(index, listed):
            document = self._encoded(row)
            if not is_held_out(row, data.held_out_share, self._context.config.seed):
                documents.append((number, document))
            elif not loses_answer(document[1], length):
                held_out.append(document)
        return Read(documents, held_out, listed)

    def _encoded(self, row: Record) -> Document:
        return styles.encode_completion(self._tokenizer, *answer_of(row), self._context.config.data.style)
