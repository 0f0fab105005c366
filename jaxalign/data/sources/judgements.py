"""Reads single answers, judged or to imitate, from files. Each becomes a record, or is dropped and reported with the reason."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from jaxalign.data.chat.dialogues import Dialogue, cut_to_fit, is_formatted, parse_demonstration, parse_judgement
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.base import CountTokens
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow
from jaxalign.data.sources.lazy import read_records
from jaxalign.data.sources.reports import DemonstrationReport, JudgementReport
from jaxalign.data.sources.rows import data_stem
from jaxalign.errors import UserError
from jaxalign.records import Demonstration, Judgement, Prompt


@dataclasses.dataclass(frozen=True)
class AnswerReader:
    """Makes the answer of a row.

    Attributes:
      name: the beginning of each `Prompt.id`.
      judged, count_tokens, max_tokens: as in `read_judgements`.
      keep_empty: whether rows with an empty answer are kept.
    """

    name: str
    judged: bool
    keep_empty: bool = False
    count_tokens: CountTokens | None = None
    max_tokens: int | None = None
    kept = "answers"

    @property
    def reasons(self) -> Mapping[str, str]:
        """For each reason, the description of its rows in sentences."""
        return (JudgementReport if self.judged else DemonstrationReport).reasons

    def read(self, row: JsonRow | BrokenLine, listed: dict[str, list]) -> Judgement | Demonstration | None:
        """The answer; None for a dropped row. The number of a dropped or changed row is added to the list of its reason."""
        parse, record = (parse_judgement, Judgement) if self.judged else (parse_demonstration, Demonstration)
        if isinstance(row, BrokenLine):
            listed["broken"].append(row)
            return None
        try:
            context, answer, *label = parse(row.value)
        except ValueError as error:
            listed["broken"].append(BrokenLine(row.line, str(error)))
            return None
        fitting = self._fitting(row.line, context, answer, listed)
        if fitting is None:
            return None
        if is_formatted((*(message.content for message in fitting), answer)):
            listed["formatted"].append(row.line)
        return record(Prompt(f"{self.name}:{row.line}", fitting, "human"), answer, *label)

    def _fitting(self, line: int, context: Dialogue, answer: str, listed: dict[str, list]) -> Dialogue | None:
        """The context, cut until it fits; None for a dropped row, which is listed under its reason."""
        if not context[-1].content.strip():
            listed["empty_prompts"].append(line)
            return None
        if not answer.strip():
            listed["empty_answers"].append(line)
            if not self.keep_empty:
                return None
        try:
            fitting = cut_to_fit(context, (answer,), self.count_tokens, self.max_tokens)
        except DialogueRefused:
            listed["refused"].append(line)
            return None
        if fitting is None:
            listed["too_long"].append(line)
        elif len(fitting) < len(context):
            listed["cut"].append(line)
        return fitting


def read_judgements(
    path: str | pathlib.Path,
    *,
    judged: bool = True,
    empty_answers: str = "drop",
    max_bad_share: float = 0.01,
    limit: int = 0,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
    columns: Sequence[str] = (),
) -> tuple[Sequence[Judgement] | Sequence[Demonstration], JudgementReport | DemonstrationReport]:
    """Reads the rows {"prompt", "completion", "label"} (see docs/preferences.md).

    Args:
      path: a .jsonl or .jsonl.gz file, or any other data that `open_rows` reads.
      judged: False reads rows {"messages"} or {"prompt", "response"} without a label (see docs/data_formats.md).
      empty_answers: "drop" or "keep" rows with an empty completion.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of judgements; 0 reads all.
      count_tokens: counts the tokens of a context with an answer, encoded as the stage encodes it; None with `max_tokens`.
      max_tokens: the maximum that `count_tokens` may return; the oldest turns of a context are dropped until the answer fits.
      columns: the entries of `config.data.columns`.

    Returns:
      The judgements or demonstrations in file order, with prompt ids "NAME:LINE", and the report. Those of a table are made
      when they are needed.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, or no answer is left.
    """
    reader = AnswerReader(data_stem(path), judged, empty_answers == "keep", count_tokens, max_tokens)
    uncut = dataclasses.replace(reader, count_tokens=None, max_tokens=None)
    read = read_records(path, columns, reader, uncut, max_bad_share, limit, lambda answer: judged and answer.desirable)
    shared = {"path": str(path), "rows": read.rows, **read.lines, "unit": read.unit}
    if judged:
        report = JudgementReport(desirable=read.counted, undesirable=len(read.records) - read.counted, **shared)
    else:
        report = DemonstrationReport(answers=len(read.records), **shared)
    if not read.records:
        raise UserError(f"no {'judged ' * judged}answer is left: {'; '.join(report.sentences())}; {report.remedy()}")
    return read.records, report
