"""Single judged answers from JSONL: each row becomes a Judgement, or is counted and listed with the reason it is dropped."""

from __future__ import annotations

import pathlib

from jaxalign.data.chat.dialogues import Dialogue, cut_front, parse_judgement
from jaxalign.data.sources.base import CountTokens
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share, file_stem, iterate_jsonl
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
      empty_answers: "drop", or "keep" rows whose completion is empty.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after this many judgements; 0 reads all.
      count_tokens: tokens of the complete sequence of a context and an answer, as the stage will encode it.
      max_tokens: the most that `count_tokens` may give; the oldest turns of a context are dropped until the answer fits. Given
        with `count_tokens` or not at all.

    Returns:
      Judgements in file order, with the prompt ids "NAME:LINE", and the report.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, or no answer is left.
    """
    listed: dict[str, list] = {field: [] for field in JudgementReport.reasons}
    found: list[Judgement] = []
    rows = 0

    def fitted(context: Dialogue, answer: str) -> Dialogue | None:
        if count_tokens is None or max_tokens is None:
            return context
        return cut_front(context, lambda part: count_tokens(part, answer) <= max_tokens)

    for row in iterate_jsonl(path):
        rows += 1
        if isinstance(row, BrokenLine):
            listed["broken"].append(row)
            continue
        try:
            context, answer, desirable = parse_judgement(row.value)
        except ValueError as error:
            listed["broken"].append(BrokenLine(row.line, str(error)))
            continue
        if not context[-1].content.strip():
            listed["empty_prompts"].append(row.line)
            continue
        if not answer.strip():
            listed["empty_answers"].append(row.line)
            if empty_answers == "drop":
                continue
        short = fitted(context, answer)
        if short is None:
            listed["too_long"].append(row.line)
            continue
        if len(short) < len(context):
            listed["cut"].append(row.line)
        found.append(Judgement(Prompt(f"{file_stem(path)}:{row.line}", short, "human"), answer, desirable))
        if limit and len(found) == limit:
            break
    check_bad_share(path, listed["broken"], rows, max_bad_share)
    good = sum(judgement.desirable for judgement in found)
    lines = {name: tuple(lines) for name, lines in listed.items()}
    report = JudgementReport(str(path), rows, good, len(found) - good, **lines)
    if not found:
        raise UserError(f"no judged answer is left: {'; '.join(report.sentences())}; give a file with usable rows")
    return found, report
