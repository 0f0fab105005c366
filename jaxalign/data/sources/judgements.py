"""Reads single answers, judged or to imitate, from files. Each becomes a record, or is dropped and reported with the reason."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from jaxalign.data.chat.dialogues import Dialogue, cut_to_fit, parse_demonstration, parse_judgement
from jaxalign.data.chat.formatted import is_formatted
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.base import CountTokens
from jaxalign.data.sources.jsonl import BrokenLine, JsonRow, check_bad_share
from jaxalign.data.sources.lazy import KeptRecords
from jaxalign.data.sources.repeats import RepeatedRows
from jaxalign.data.sources.reports import DemonstrationReport, JudgementReport
from jaxalign.data.sources.rows import data_stem, open_rows
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
        fitting = _fitting(row.line, context, answer, listed, self.keep_empty, self.count_tokens, self.max_tokens)
        if fitting is None:
            return None
        if is_formatted((*(message.content for message in fitting), answer)):
            listed["formatted"].append(row.line)
        return record(Prompt(f"{self.name}:{row.line}", fitting, "human"), answer, *label)


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
    listed: dict[str, list] = {field: [] for field in JudgementReport.reasons}
    reader = AnswerReader(data_stem(path), judged, empty_answers == "keep", count_tokens, max_tokens)
    source_rows, rows, good = open_rows(path, columns), 0, 0
    kept, repeated = KeptRecords(source_rows), RepeatedRows()
    for row in source_rows:
        rows += 1
        record = reader.read(row, listed)
        if record is not None:
            kept.add(row, record)
            repeated.add(row.line, record)
            good += bool(judged and record.desirable)
        if limit and len(kept) == limit:
            break
    check_bad_share(path, listed["broken"], rows, max_bad_share, source_rows.unit, source_rows.place,
                    columns=source_rows.first_columns)
    lines = {name: tuple(lines) for name, lines in (listed | repeated.listed()).items()}
    cut = frozenset(listed["cut"])
    whole = dataclasses.replace(reader, count_tokens=None, max_tokens=None)
    answers = kept.records(lambda row: (reader if row.line in cut else whole).read(row, collections.defaultdict(list)))
    if judged:
        counts = {"desirable": good, "undesirable": len(answers) - good}
        report = JudgementReport(path=str(path), rows=rows, **counts, **lines, unit=source_rows.unit)
    else:
        report = DemonstrationReport(path=str(path), rows=rows, answers=len(answers), **lines, unit=source_rows.unit)
    if not answers:
        raise UserError(f"no {'judged ' * judged}answer is left: {'; '.join(report.sentences())}; give a file with usable rows")
    return answers, report


def _fitting(
    line: int, context: Dialogue, answer: str, listed: dict[str, list], keep_empty: bool, count_tokens: CountTokens | None,
    max_tokens: int | None,
) -> Dialogue | None:
    """The context, cut until it fits; None for a dropped row, which is listed under its reason."""
    if not context[-1].content.strip():
        listed["empty_prompts"].append(line)
        return None
    if not answer.strip():
        listed["empty_answers"].append(line)
        if not keep_empty:
            return None
    try:
        fitting = cut_to_fit(context, (answer,), count_tokens, max_tokens)
    except DialogueRefused:
        listed["refused"].append(line)
        return None
    if fitting is None:
        listed["too_long"].append(line)
    elif len(fitting) < len(context):
        listed["cut"].append(line)
    return fitting
