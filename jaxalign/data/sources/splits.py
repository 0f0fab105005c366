"""Operations on the rows of any data source: the split by dialogue, unique prompts, and cutting to a maximum length."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from jaxalign.data.chat.dialogues import Dialogue, cut_front, cut_to_fit
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Prompt

Prompted = TypeVar("Prompted", Prompt, Comparison, Judgement)
Answered = TypeVar("Answered", Comparison, Judgement)


class FittedPrompts(NamedTuple):
    """The prompts that fit, and the ids of prompts that were cut or dropped.

    Attributes:
      prompts: the prompts that fit, cut at a turn if needed.
      cut: ids of prompts that lost their oldest turns.
      too_long: ids of prompts that do not fit even with only their last turn.
      refused: ids of prompts that the chat template or the style refuses.
      reason: the reason for the first of them.
    """

    prompts: list[Prompt]
    cut: tuple[str, ...]
    too_long: tuple[str, ...]
    refused: tuple[str, ...]
    reason: str = ""


def fit_prompts(prompts: Sequence[Prompt], count_tokens: Callable[[Dialogue], int], max_tokens: int) -> FittedPrompts:
    """Cuts each prompt at a turn, oldest turns first, until `count_tokens` of its messages is at most `max_tokens`."""
    fitted, cut, too_long, refused, reason = [], [], [], [], ""
    for prompt in prompts:
        try:
            context = cut_front(prompt.messages, lambda messages: count_tokens(messages) <= max_tokens)
        except DialogueRefused as error:
            refused.append(prompt.id)
            reason = reason or str(error)
            continue
        if context is None:
            too_long.append(prompt.id)
            continue
        if len(context) < len(prompt.messages):
            cut.append(prompt.id)
        fitted.append(dataclasses.replace(prompt, messages=context))
    return FittedPrompts(fitted, tuple(cut), tuple(too_long), tuple(refused), reason)


def fit_answered(
    rows: Sequence[Answered], count_tokens: Callable[[Dialogue, str], int], max_tokens: int
) -> tuple[list[Answered], int]:
    """Cuts the dialogue of each row at a turn, oldest turns first, until it fits with each of the row's answers.

    Returns:
      The rows that fit, and the number of dropped rows: too long even with only the last turn, or refused by the template.
    """
    fitted = []
    for row in rows:
        answers = (row.response,) if isinstance(row, Judgement) else (row.response_a, row.response_b)
        try:
            context = cut_to_fit(row.prompt.messages, answers, count_tokens, max_tokens)
        except DialogueRefused:
            context = None
        if context is not None:
            fitted.append(dataclasses.replace(row, prompt=dataclasses.replace(row.prompt, messages=context)))
    return fitted, len(rows) - len(fitted)


def unique_prompts(rows: Sequence[Answered]) -> list[Prompt]:
    """The prompts of comparisons or judgements in order, with only the first prompt of each distinct dialogue."""
    seen: dict[Dialogue, Prompt] = {}
    for row in rows:
        seen.setdefault(row.prompt.messages, row.prompt)
    return list(seen.values())


_MOST = 5
"""To reach a minimum number, at most one of so many dialogues is held out."""


def held_out_count(total: int, count: int, minimum: int) -> int:
    """The number of `total` rows to hold out: `count`, or more to reach `minimum`, as long as that is at most a fifth."""
    return max(count, min(minimum, total // _MOST))


def few_held_out(total: int, held_out: int, minimum: int, rows: str = "dialogues") -> str:
    """A sentence if fewer rows than `minimum` are held out, else "". rows: the name of the rows."""
    if not 0 < held_out < minimum:
        return ""
    held = f"1 {rows[:-1]} is" if held_out == 1 else f"{held_out} {rows} are"
    return f"{held} held out of {total}: data.min_held_out is {minimum}, but it holds out at most a fifth"


def split_by_prompt(
    rows: Sequence[Prompted], held_out_share: float, seed: int = 0, minimum: int = 0
) -> tuple[list[Prompted], list[Prompted]]:
    """Splits rows into (train, held out) so that no dialogue is in both; independent of the order of the rows.

    Args:
      rows: prompts, comparisons or judgements.
      held_out_share: the fraction of distinct dialogues to hold out, in [0, 1); at least one dialogue if it is above 0.
      seed: selects the split.
      minimum: the minimum number of dialogues to hold out if the share is above 0; see `held_out_count`.

    Raises:
      UserError: nothing would be left to train on.
    """
    digests = {_dialogue(row): b"" for row in rows}
    for messages in digests:
        text = repr((seed, [(message.role, message.content) for message in messages]))
        digests[messages] = hashlib.sha256(text.encode("utf-8")).digest()
    count = held_out_count(len(digests), max(1, round(held_out_share * len(digests))), minimum) if held_out_share > 0 else 0
    if count >= len(digests):
        raise UserError(f"a held-out share of {held_out_share:g} leaves none of {len(digests)} distinct dialogues to train on; "
                        "lower held_out_share or give more rows")
    held = set(sorted(digests, key=digests.get)[:count])
    return [row for row in rows if _dialogue(row) not in held], [row for row in rows if _dialogue(row) in held]


def few_dialogues(train: Sequence[Prompted], held_out: Sequence[Prompted], minimum: int) -> str:
    """`few_held_out` for the distinct dialogues of a split."""
    held = len({_dialogue(row) for row in held_out})
    return few_held_out(held + len({_dialogue(row) for row in train}), held, minimum)


def _dialogue(row: Prompted) -> Dialogue:
    return row.messages if isinstance(row, Prompt) else row.prompt.messages
