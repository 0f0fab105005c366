"""Human preference pairs from JSONL: each row becomes a Comparison, or is counted and listed under the reason why not.

Nothing is assumed about a row: chosen and rejected are parsed turn by turn and their shared context is computed, since
public data does not always share it (in HH-RLHF's harmless test set 5 of 2,312 rows differ, and 4 chosen answers are
empty).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxalign.data.chat.dialogues import Answers, Dialogue, cut_front, parse_pair, split_answers
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.jsonl import BrokenLine, check_bad_share, iterate_jsonl
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Prompt

CountTokens = Callable[[Dialogue, str], int]
_LISTED = 10  # line numbers that a summary spells out for each reason; the rest is counted


@dataclasses.dataclass(frozen=True)
class PreferenceReport:
    """What became of every row of one file. Tuples hold line numbers, from 1.

    rows = pairs + broken + identical + no_common_question + empty_prompts + too_long + refused, plus differing_contexts
    and empty_answers where those are dropped (a row counts under the first reason that drops it). cut rows and those with a bad
    margin are kept, and so are differing and empty ones under "keep": a kept row may be listed more than once.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for a stage's summary."""
        return dataclasses.asdict(self)

    def sentences(self) -> list[str]:
        """One line of text for each reason that met a row, after the totals."""
        lines = [f"{self.path}: {self.rows} rows read, {self.pairs} pairs kept"]
        for field, meaning in _MEANING.items():
            lines += listed_lines(getattr(self, field), meaning)
        return lines


def listed_lines(places: Sequence[int | BrokenLine], meaning: str) -> list[str]:
    """One sentence that counts rows and names the first of their lines; none where there are none."""
    numbers = [place.line if isinstance(place, BrokenLine) else place for place in places]
    if not numbers:
        return []
    more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return [f"{len(numbers)} {meaning} (lines {', '.join(map(str, numbers[:_LISTED]))}{more})"]


@dataclasses.dataclass(frozen=True)
class MixtureReport:
    """The reports of several files."""

    files: tuple[PreferenceReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for a stage's summary."""
        return {"files": [report.to_dict() for report in self.files]}

    def sentences(self) -> list[str]:
        """Those of each file."""
        return [sentence for report in self.files for sentence in report.sentences()]


_MEANING = {
    "broken": "broken: no JSON, or no pair of dialogues; left out",
    "differing_contexts": "with contexts that differ",
    "identical": "with two equal answers; left out",
    "no_common_question": "without a user's turn that both answers follow; left out",
    "empty_prompts": "with an empty question; left out",
    "empty_answers": "with an empty answer",
    "cut": "over-long, oldest turns cut",
    "too_long": "over-long even with the last question alone; left out",
    "refused": "that the model's chat template refuses; left out",
    "bad_margins": "with a margin that is no number of at least 0; taken as 0",
}


@dataclasses.dataclass(frozen=True)
class _Options:
    differing_contexts: str
    empty_answers: str
    count_tokens: CountTokens | None
    max_tokens: int | None

    def __post_init__(self):
        for name in ("differing_contexts", "empty_answers"):
            if getattr(self, name) not in ("drop", "keep"):
                raise UserError(f"data.{name} is {getattr(self, name)!r}; 'drop' or 'keep' is expected")
        if (self.count_tokens is None) != (self.max_tokens is None):
            raise ValueError("count_tokens and max_tokens are given together or not at all")


def read_preferences(
    path: str | pathlib.Path,
    *,
    differing_contexts: str = "drop",
    empty_answers: str = "drop",
    max_bad_share: float = 0.01,
    limit: int = 0,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
    source: str = "human",
    margins: bool = False,
    name: str | None = None,
) -> tuple[list[Comparison], PreferenceReport]:
    """Reads the pairs of a .jsonl or .jsonl.gz file whose rows hold `chosen` and `rejected` (see docs/preferences.md).

    Args:
      path: the file.
      differing_contexts: "drop", or "keep" with the longest shared context and all that follows it as the answers.
      empty_answers: "drop", or "keep" rows whose chosen or rejected answer is empty.
      max_bad_share: the largest accepted share of broken rows, in [0, 1].
      limit: stop after that many pairs; 0 reads all.
      count_tokens: tokens of the complete sequence of a context and an answer, as the stage will encode it.
      max_tokens: the room for it; the oldest turns of a context are dropped until both answers fit.
      source: becomes `Prompt.source`.
      name: what `Prompt.id` begins with; None for the file's own name.
      margins: read each row's "margin", by how much the chosen answer is better; a row without one has the margin 0.

    Returns:
      Comparisons in file order, the chosen answer first with label 1.0, and the report.

    Raises:
      UserError: the file is missing or damaged, too many rows are broken, no pair is left, or none has a margin that is to
        be read.
    """
    options = _Options(differing_contexts, empty_answers, count_tokens, max_tokens)
    name = name or file_stem(path)
    listed: dict[str, list] = {field: [] for field in _MEANING}
    pairs: list[Comparison] = []
    rows = 0
    for row in iterate_jsonl(path):
        rows += 1
        answers = None
        if isinstance(row, BrokenLine):
            listed["broken"].append(row)
        else:
            answers = _answers(row.line, row.value, options, listed)
        if answers is not None:
            prompt = Prompt(f"{name}:{row.line}", answers.context, source)
            margin = _margin(row.line, row.value, listed) if margins else None
            pairs.append(Comparison(prompt, answers.chosen, answers.rejected, label=1.0, margin=margin))
        if limit and len(pairs) == limit:
            break
    check_bad_share(path, listed["broken"], rows, max_bad_share)
    report = PreferenceReport(str(path), rows, len(pairs), **{name: tuple(lines) for name, lines in listed.items()})
    if not pairs:
        raise UserError(f"no pair of answers is left: {'; '.join(report.sentences())}; give a file with usable rows")
    if margins and not any(pair.margin for pair in pairs):
        raise UserError(f"no row of {path} has a \"margin\" above 0, and config.preference.margin_weight asks for margins; set "
                        "it to 0, or give a file with them")
    return pairs, report


def file_stem(path: str | pathlib.Path) -> str:
    """The file's name without .jsonl and .gz."""
    return pathlib.Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def _margin(line: int, value: dict[str, Any], listed: dict[str, list]) -> float:
    found = value.get("margin", 0.0)
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < math.inf:
        return float(found)
    listed["bad_margins"].append(line)
    return 0.0


def _answers(line: int, value: dict[str, Any], options: _Options, listed: dict[str, list]) -> Answers | None:
    """The row's context and answers, or None with its line listed under the reason."""
    try:
        chosen, rejected = parse_pair(value)
    except ValueError as error:
        listed["broken"].append(BrokenLine(line, str(error)))
        return None
    if chosen == rejected:
        listed["identical"].append(line)
        return None
    if chosen[:-1] != rejected[:-1]:
        listed["differing_contexts"].append(line)
        if options.differing_contexts == "drop":
            return None
    answers = split_answers(chosen, rejected)
    if answers is None:
        listed["no_common_question"].append(line)
        return None
    if not answers.context[-1].content.strip():
        listed["empty_prompts"].append(line)
        return None
    if not answers.chosen.strip() or not answers.rejected.strip():
        listed["empty_answers"].append(line)
        if options.empty_answers == "drop":
            return None
    return _fitted(line, answers, options, listed)


def _fitted(line: int, answers: Answers, options: _Options, listed: dict[str, list]) -> Answers | None:
    count, room = options.count_tokens, options.max_tokens
    if count is None or room is None:
        return answers

    def fits(context: Dialogue) -> bool:
        return max(count(context, answers.chosen), count(context, answers.rejected)) <= room

    try:
        context = cut_front(answers.context, fits)
    except DialogueRefused:
        listed["refused"].append(line)
        return None
    if context is None:
        listed["too_long"].append(line)
        return None
    if len(context) < len(answers.context):
        listed["cut"].append(line)
    return answers._replace(context=context)


class FittedPrompts(NamedTuple):
    """Prompts that fit, and the ids of those whose oldest turns were cut for it and of those left out: too long, or refused
    by the chat template."""

    prompts: list[Prompt]
    cut: tuple[str, ...]
    too_long: tuple[str, ...]
    refused: tuple[str, ...]


def fit_prompts(prompts: Sequence[Prompt], count_tokens: Callable[[Dialogue], int], max_tokens: int) -> FittedPrompts:
    """Cuts each prompt at a turn, oldest turns first, until `count_tokens` of its messages is at most `max_tokens`."""
    fitted, cut, too_long, refused = [], [], [], []
    for prompt in prompts:
        try:
            context = cut_front(prompt.messages, lambda messages: count_tokens(messages) <= max_tokens)
        except DialogueRefused:
            refused.append(prompt.id)
            continue
        if context is None:
            too_long.append(prompt.id)
            continue
        if len(context) < len(prompt.messages):
            cut.append(prompt.id)
        fitted.append(dataclasses.replace(prompt, messages=context))
    return FittedPrompts(fitted, tuple(cut), tuple(too_long), tuple(refused))


Prompted = TypeVar("Prompted", Comparison, Judgement)


def unique_prompts(comparisons: Sequence[Prompted]) -> list[Prompt]:
    """The prompts of the comparisons or judgements, each dialogue once (the first that has it), in their order."""
    seen: dict[Dialogue, Prompt] = {}
    for comparison in comparisons:
        seen.setdefault(comparison.prompt.messages, comparison.prompt)
    return list(seen.values())


def split_by_prompt(
    comparisons: Sequence[Prompted], held_out_share: float, seed: int = 0
) -> tuple[list[Prompted], list[Prompted]]:
    """Splits into (train, held out) so that no dialogue is on both sides; the order of the rows plays no part.

    held_out_share in [0, 1) is a share of the distinct dialogues, rounded, and at least one of them when it is above 0.

    Raises:
      UserError: nothing would be left to train on.
    """
    digests = {comparison.prompt.messages: b"" for comparison in comparisons}
    for messages in digests:
        text = repr((seed, [(message.role, message.content) for message in messages]))
        digests[messages] = hashlib.sha256(text.encode("utf-8")).digest()
    count = max(1, round(held_out_share * len(digests))) if held_out_share > 0 else 0
    if count >= len(digests):
        raise UserError(
            f"a held-out share of {held_out_share:g} leaves nothing of {len(digests)} distinct dialogues to train on; "
            "lower held_out_share or give more rows"
        )
    held = set(sorted(digests, key=digests.get)[:count])
    train = [comparison for comparison in comparisons if comparison.prompt.messages not in held]
    return train, [comparison for comparison in comparisons if comparison.prompt.messages in held]
