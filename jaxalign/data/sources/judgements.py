"""Reads single judged answers from JSONL. Each row becomes a Judgement, or is dropped and reported with the reason."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from jaxalign.data.chat.dialogues import Dialogue, cut_front, parse_judgement
from jaxalign.data.sources.base import CountTokens
from jaxalign.data.sources.jsonl import BrokenLine, Row, check_bad_share, file_stem, iterate_jsonl
from jaxalign.data.sources.reports import JudgementReport
from jaxalign.errors import UserError
from jaxalign.records import Judgement, Prompt


def read_judgements(
    path: str | pathlib.Path,
    *,
    empty_answers: str = "drop",
    max_bad_share: float = 0.01,
    limit: int = 0,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
) -> tuple[list[Judgement], JudgementReport]:
    """Reads the rows {"prompt", "completion", "label"} of a .jsonl or .jsonl.gz file (see docs/preferences.md).

    Args:
      path: the file.
      empty_answers: "drop" or "keep" rows with an empty completion.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this number of judgements; 0 reads all.
      count_tokens: counts the tokens of a context with an answer, encoded as the stage encodes it; None with `max_tokens`.
      max_tokens: the maximum that `count_tokens` may return; the oldest turns of a context are dropped until the answer fits.

    Returns:
      The judgements in file order, with prompt ids "NAME:LINE", and the report.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, or no answer is left.
    """
    listed: dict[str, list] = {field: [] for field in JudgementReport.reasons}
    found: list[Judgement] = []
    rows = 0

    def fits(context: Dialogue, answer: str) -> bool:
        return count_tokens is None or max_tokens is None or count_tokens(context, answer) <= max_tokens

    for row in iterate_jsonl(path):
        rows += 1
        if isinstance(row, BrokenLine):
            listed["broken"].append(row)
            continue
        judged = _judged(row, fits, empty_answers == "keep", listed)
        if judged is not None:
            context, answer, desirable = judged
            found.append(Judgement(Prompt(f"{file_stem(path)}:{row.line}", context, "human"), answer, desirable))
        if limit and len(found) == limit:
            break
    check_bad_share(path, listed["broken"], rows, max_bad_share)
    good = sum(judgement.desirable for judgement in found)
    lines = {name: tuple(lines) for name, lines in listed.items()}
    report = JudgementReport(str(path), rows, good, len(found) - good, **lines)
    if not found:
        raise UserError(f"no judged answer is left: {'; '.join(report.sentences())}; give a file with usable rows")
    return found, report


def _judged(
    row: Row, fits: Callable[[Dialogue, str], bool], keep_empty: bool, listed: dict[str, list]
) -> tuple[Dialogue, str, bool] | None:
    """(context, answer, whether the answer is good) of a row; None for a dropped row, which is listed under its reason."""
    try:
        context, answer, desirable = parse_judgement(row.value)
    except ValueError as error:
        listed["broken"].append(BrokenLine(row.line, str(error)))
        return None
    if not context[-1].content.strip():
        listed["empty_prompts"].append(row.line)
        return None
    if not answer.strip():
        listed["empty_answers"].append(row.line)
        if not keep_empty:
            return None
    short = cut_front(context, lambda part: fits(part, answer))
    if short is None:
        listed["too_long"].append(row.line)
        return None
    if len(short) < len(context):
        listed["cut"].append(row.line)
    return short, answer, desirable
