"""Reports on the rows of data files: counts, and the lines that were dropped or changed."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.reasons import mostly_dropped, often_contradicted

BROKEN = "broken; dropped"
FORMATTED = ("with the markers of a chat template in their text, such as <|im_start|> or a first 'Human:'; kept as plain text, "
             "so the template is applied again")
REPEATED = "with the dialogue and the answers of an earlier row; kept, so they weigh more in training"
_LISTED = 10  # Line numbers that a sentence lists for each reason; it counts the rest.


class FileReport:
    """A report on the rows of one file. A subclass is a dataclass with a tuple of line numbers for each reason.

    `unit` is what the numbers count: "line", "item" (of a JSON array) or "row" (of a table, through all files of
    a folder).
    """

    reasons: ClassVar[Mapping[str, str]]
    """For each field of line numbers, the description of its rows in sentences."""
    kept: ClassVar[str]
    """The numbers of rows kept, with fields of the report in braces."""
    names_unit: ClassVar[bool] = False
    """Whether `to_dict` names the unit of lines."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the summary of a stage. Only prompts have the unit if it is a line."""
        values = dataclasses.asdict(self)
        left_out = {"unit": None if self.names_unit else "line", "total_rows": 0}
        return {name: value for name, value in values.items() if name not in left_out or value != left_out[name]}

    def remedy(self) -> str:
        """What to do if no row is kept."""
        if len(getattr(self, "too_long", ())) > self.rows / 2:
            return ("raise model.max_length, and preference.max_length for pairs and judged answers, or give a file with "
                    "shorter rows")
        return "give a file with usable rows"

    def sentences(self) -> list[str]:
        """The numbers of rows read and kept, a sentence for each reason that applies to a row, and warnings if more than half
        of the rows were dropped or many contradict others."""
        total = vars(self).get("total_rows")
        rows = f"{self.rows:,} of {total:,} rows read" if total else f"{self.rows} rows read"
        sentences = [f"{self.path}: {rows}, {self.kept.format_map(vars(self))} kept"]
        for field, meaning in self.reasons.items():
            places = getattr(self, field)
            numbers = [str(place.line if isinstance(place, BrokenLine) else place) for place in places]
            more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
            if numbers:
                first = first_broken(self.unit, places[0].line, places[0].reason) if field == "broken" else ""
                sentences.append(f"{len(numbers)} {meaning} ({self.unit}s {', '.join(numbers[:_LISTED])}{more}){first}")
        kept = sum(vars(self)[field] for _, field, _, _ in string.Formatter().parse(self.kept) if field)
        warnings = (mostly_dropped(self.path, self.rows, kept, len(getattr(self, "too_long", ()))),
                    often_contradicted(self.path, kept, len(getattr(self, "contradicted", ()))))
        return [*sentences, *(f"warning: {warning}" for warning in warnings if warning)]


@dataclasses.dataclass(frozen=True)
class PreferenceReport(FileReport):
    """A report on the rows of a file of pairs. Tuples contain line numbers, which start at 1.

    rows = pairs + broken + identical + no_common_question + empty_prompts + too_long + refused, plus differing_contexts and
    empty_answers if those rows are dropped. A dropped row counts under the first reason that drops it. Rows that were cut,
    have a bad margin or repeat an earlier row are kept, as are rows with differing contexts or empty answers under "keep". A
    kept row may be listed more than once. Repeated and contradicted rows are those among the first million rows kept.
    """

    path: str
    rows: int
    pairs: int
    broken: tuple[BrokenLine, ...]
    differing_contexts: tuple[int, ...]
    identical: tuple[int, ...]
    no_common_question: tuple[int, ...]
    empty_prompts: tuple[int, ...]
    empty_answers: tuple[int, ...]
    cut: tuple[int, ...]
    too_long: tuple[int, ...]
    refused: tuple[int, ...]
    bad_margins: tuple[int, ...]
    repeated: tuple[int, ...] = ()
    contradicted: tuple[int, ...] = ()
    formatted: tuple[int, ...] = ()
    unit: str = "line"

    kept = "{pairs} pairs"
    reasons = {  # noqa: RUF012
        "broken": BROKEN,
        "differing_contexts": "with contexts that differ (dropped unless data.differing_contexts is keep)",
        "identical": "with two equal answers; dropped",
        "no_common_question": "without a common user turn that both dialogues answer; dropped",
        "empty_prompts": "with an empty question; dropped",
        "empty_answers": "with an empty answer (dropped unless data.empty_answers is keep)",
        "cut": "too long, oldest turns cut",
        "too_long": "too long even with only the last question; dropped",
        "refused": "rejected by the chat template or the style; dropped",
        "bad_margins": "with a margin that is not a number of at least 0; read as 0",
        "repeated": REPEATED,
        "contradicted": "with the answers of an earlier row, but the other one chosen; kept, so that the rows cancel",
        "formatted": FORMATTED,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReport(FileReport):
    """A report on the rows of a file of answers. Tuples contain line numbers, which start at 1.

    rows = the answers kept + broken + empty_prompts + too_long + refused, plus empty_answers if those rows are dropped. A
    dropped row counts under the first reason that drops it. Rows of the other reasons are kept, as are empty answers under
    "keep". Repeated and contradicted rows are those among the first million rows kept.
    """

    path: str
    rows: int
    broken: tuple[BrokenLine, ...]
    empty_prompts: tuple[int, ...]
    empty_answers: tuple[int, ...]
    cut: tuple[int, ...]
    too_long: tuple[int, ...]
    refused: tuple[int, ...]
    repeated: tuple[int, ...] = ()
    contradicted: tuple[int, ...] = ()
    formatted: tuple[int, ...] = ()
    unit: str = "line"

    reasons = {  # noqa: RUF012
        "broken": BROKEN,
        "empty_prompts": "with an empty question; dropped",
        "empty_answers": "with an empty answer (dropped unless data.empty_answers is keep)",
        "cut": "too long, oldest turns cut",
        "too_long": "too long even with only the last question; dropped",
        "refused": "rejected by the chat template or the style; dropped",
        "repeated": REPEATED,
        "contradicted": "with the answer of an earlier row, but the opposite label; kept, so that the rows cancel",
        "formatted": FORMATTED,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgementReport(AnswerReport):
    """A report on the rows of a file of judged answers."""

    desirable: int
    undesirable: int

    kept = "{desirable} good and {undesirable} bad answers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationReport(AnswerReport):
    """A report on the rows of a file of answers to imitate."""

    answers: int

    kept = "{answers} answers"


@dataclasses.dataclass(frozen=True)
class PromptReport(FileReport):
    """A report on the rows of a file of prompts. Tuples contain line numbers, which start at 1.

    rows = prompts + broken + duplicates, unless reading stopped at a limit or rows that answer the prompts were dropped for
    other reasons. The prompts include those of `evaluated` and `in_red_team`. total_rows: the rows of the data if only those of
    a window were read (`config.data.window`), else 0.
    """

    path: str
    rows: int
    prompts: int
    broken: tuple[BrokenLine, ...]
    duplicates: tuple[int, ...]
    evaluated: tuple[int, ...] = ()
    in_red_team: tuple[int, ...] = ()
    formatted: tuple[int, ...] = ()
    unit: str = "line"
    total_rows: int = 0

    kept = "{prompts} prompts"
    names_unit = True
    reasons = {  # noqa: RUF012
        "broken": BROKEN,
        "duplicates": "with the dialogue of an earlier row; dropped",
        "evaluated": "used only for evaluation",
        "in_red_team": "also in config.data.red_team; used only there",
        "formatted": FORMATTED,
    }


WINDOW_REASONS = {
    "no_answer_left": "whose whole answer is beyond sft.row_length; dropped",
    "equal_when_cut": "whose answers differ only in tokens beyond the stage's max_length; dropped",
}
"""Further reasons in reports on windows (`window_rows.WindowReport`), which have the rows of each reason as "counts"."""


def first_broken(unit: str, line: int, reason: str) -> str:
    """The end of a sentence about broken rows: the first one and its reason. unit: what `line` counts, as in `FileReport`."""
    return f"; {unit} {line}: {reason}"


def rows_of_reason(report: Mapping[str, Any], reason: str) -> int:
    """The number of rows of a reason in the plain values of a report."""
    return report["counts"].get(reason, 0) if "counts" in report else len(report.get(reason) or ())


@dataclasses.dataclass(frozen=True)
class MixtureReport:
    """The reports of several files."""

    files: tuple[FileReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the summary of a stage."""
        return {"files": [report.to_dict() for report in self.files]}

    def sentences(self) -> list[str]:
        """The sentences of each file."""
        return [sentence for report in self.files for sentence in report.sentences()]
