"""Rows that are read in windows: by index, with a report on those that were read so far."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign import streams
from jaxalign.config import DataConfig
from jaxalign.data.sources.base import PromptSets, dialogue_digest, unique_prompts
from jaxalign.data.sources.indexed_lines import IndexedLines
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share
from jaxalign.data.sources.lazy import RowReader
from jaxalign.data.sources.reports import WINDOW_REASONS, first_broken
from jaxalign.data.sources.row_files import ListedRows
from jaxalign.data.sources.tables import TableRows
from jaxalign.data.windows import WindowNotes, WindowOrder, noted
from jaxalign.reasons import mostly_dropped
from jaxalign.records import Comparison, Demonstration, Judgement

Record = Comparison | Demonstration | Judgement


class WindowRows(NamedTuple):
    """The rows of a source by index, and the reader that makes their records."""

    rows: TableRows | IndexedLines
    reader: RowReader

    def records(self, index: Sequence[int], listed: dict[str, list]) -> list[tuple[int, Record]]:
        """(number, record) of the rows `index` that are kept; the others are added to `listed`."""
        rows = [self.rows[i] for i in index]
        read = [(row.line, self.reader.read(row, listed)) for row in rows]
        return [(number, record) for number, record in read if record is not None]


def is_held_out(row: Record, share: float, seed: int) -> bool:
    """Whether a row is held out: a hash of its dialogue is below the share. Rows with equal dialogues are not separated."""
    return dialogue_digest(row, seed) < share * 2.0**64


def window_of_prompts(rows: TableRows | IndexedLines | ListedRows, window: int, seed: int) -> Iterator[int]:
    """The indices of the rows that give the prompts of a run: one window of them, or all if they fit, in the order of the data.

    Args:
      rows: the rows.
      window: the maximum number of indices.
      seed: the run's seed. Every stage and every round of a run reads the same window.
    """
    if len(rows) <= window:
        yield from range(len(rows))
    else:
        for block in WindowOrder(len(rows), window, seed, streams.LOADERS["window of prompts"]).blocks_of(0):
            yield from block.tolist()


def prompts_of_answered(source: WindowRows, data: DataConfig, seed: int) -> PromptSets:
    """The prompts of answered rows: the distinct dialogues of a window, of which those of `is_held_out` are for evaluation.

    Args:
      source: the rows.
      data: the section of the config.
      seed: the run's seed.

    Raises:
      UserError: too many of the rows are broken.
    """
    listed = collections.defaultdict(list)
    index = list(window_of_prompts(source.rows, data.window, seed))
    records = [record for _, record in source.records(index, listed)]
    parts = [[row for row in records if is_held_out(row, data.held_out_share, seed) == held] for held in (False, True)]
    report, (train, held_out) = WindowReport(source, data.max_bad_share, source.reader.kept), map(len, parts)
    report.add(WindowNotes(len(index), train, 0, held_out, 0, *noted(listed)))
    return PromptSets(*map(unique_prompts, parts), reports=(report,))


@dataclasses.dataclass
class WindowReport:
    """The report on the rows of windows, which adds them up as they are read. A row that is read again is not counted again.

    Args:
      source: the rows.
      max_bad_share: the largest accepted share of broken rows among those read so far.
      unit: the name of the rows that are trained on.
    """

    source: WindowRows
    max_bad_share: float
    unit: str = "answers"
    rows: int = 0
    answers: int = 0
    held_out: int = 0
    windows: int = 0
    cut_rows: int = 0
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, list] = dataclasses.field(default_factory=dict)

    def add(self, notes: WindowNotes) -> None:
        """Adds a window. Raises UserError if too many of the rows read so far are broken."""
        table, rows, counts = self.source.rows, self.rows + notes.rows, self.counts + collections.Counter(notes.counts)
        first = {
            reason: [*self.first.get(reason, ()), *notes.first.get(reason, ())][: WindowNotes.LISTED] for reason in counts
        }
        broken = [BrokenLine(*place) for place in first.get("broken", ())]
        check_bad_share(table.path, broken, rows, self.max_bad_share, table.unit, table.place, counts["broken"],
                        table.first_columns)
        self.rows, self.counts, self.first = rows, counts, first
        self.windows, self.answers = self.windows + 1, self.answers + notes.answers
        self.held_out, self.cut_rows = self.held_out + notes.held_out, self.cut_rows + notes.cut

    @property
    def reasons(self) -> Mapping[str, str]:
        """For each reason, the description of its rows."""
        return {**self.source.reader.reasons, **WINDOW_REASONS}

    def sentences(self) -> list[str]:
        """The numbers of rows read and kept, a sentence for each reason that applies to a row, and a warning if more than half
        of the rows were dropped."""
        table = self.source.rows
        windows = "1 window" if self.windows == 1 else f"{self.windows} windows"
        lines = [f"{table.path}: {self.rows:,} of {len(table):,} rows read in {windows}, {self.answers:,} {self.unit} to train "
                 f"on, {self.held_out:,} held out"]
        for reason, meaning in self.reasons.items():
            if count := self.counts[reason]:
                numbers = [str(place[0] if reason == "broken" else place) for place in self.first[reason]]
                more = f" and {count - len(numbers)} more" if count > len(numbers) else ""
                first = first_broken(table.unit, *self.first[reason][0]) if reason == "broken" else ""
                lines.append(f"{count} {meaning} ({table.unit}s {', '.join(numbers)}{more}){first}")
        warning = mostly_dropped(str(table.path), self.rows, self.answers + self.held_out, self.counts["too_long"])
        return [*lines, *([f"warning: {warning}"] if warning else [])]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the summary of a stage: as those of reports on files, but with the counts of rows instead of
        their numbers, and only the first broken rows."""
        counts = {reason: self.counts[reason] for reason in self.reasons}
        broken = [{"line": line, "reason": reason} for line, reason in self.first.get("broken", ())]
        table = self.source.rows
        values = {"path": str(table.path), "rows": self.rows, self.source.reader.kept: self.answers + self.held_out}
        values |= {"total_rows": len(table), "windows": self.windows, "held_out": self.held_out, "counts": counts}
        return values | {"broken": broken} | ({} if table.unit == "line" else {"unit": table.unit})
