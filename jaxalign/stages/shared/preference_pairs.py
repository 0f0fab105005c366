"""The pairs of stage preference: those of stage compare or of the data files, those of human files, and their splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxalign.data.sources.base import SourceReport, split_by_prompt, unique_prompts
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.sources.reports import PreferenceReport
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Comparison
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.fitting import token_counter
from jaxalign.stages.shared.labelled import held_out_once, labelled_split

_HUMAN = "preference.human:"
"""The beginning of `Prompt.source` of pairs from the files of `preference.human`."""


@dataclasses.dataclass(frozen=True)
class PreferencePairs:
    """The pairs of stage preference. No dialogue is in two of the first three.

    Attributes:
      train: the training pairs; those of `preference.human` come last.
      choosing: the held-out pairs on which early stopping measures the loss; empty without early stopping.
      held_out: the held-out pairs on which the accuracy is measured, without repeated ones.
      report: the report on the data files; None for the pairs of stage compare.
      human: the report on each file of `preference.human`.
    """

    train: list[Comparison]
    choosing: list[Comparison]
    held_out: list[Comparison]
    report: SourceReport | None
    human: tuple[PreferenceReport, ...]


def is_human(pair: Comparison) -> bool:
    """Whether the pair comes from a file of `preference.human`."""
    return pair.prompt.source.startswith(_HUMAN)


def preference_pairs(context: StageContext, tokenizer: Tokenizer) -> PreferencePairs:
    """Reads and splits the pairs, and prints the reports on the files of `preference.human`.

    Raises:
      UserError: there are no pairs, a file is not valid, or too few dialogues are held out for early stopping.
    """
    section = context.config.preference
    train, held_out, report = labelled_split(context, tokenizer, section, section.margin_weight > 0)
    human, reports = _human_pairs(context, tokenizer)
    if human:
        train, held_out = _with_human(context, train, held_out, human)
    choosing, held_out = held_out_parts(context, held_out_once(context, held_out))
    return PreferencePairs(train, choosing, held_out, report, reports)


def held_out_parts(context: StageContext, held_out: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """(the pairs that choose the weights, the pairs that measure the accuracy): halves of the held-out dialogues.

    An accuracy on the pairs that chose the weights would be too high. Without early stopping the first part is empty.

    Raises:
      UserError: fewer than 2 dialogues are held out.
    """
    if not context.config.preference.early_stopping:
        return [], list(held_out)
    total = len(unique_prompts(held_out))
    if total < 2:
        raise UserError(f"config.preference.early_stopping is True, which needs at least 2 held-out dialogues, but "
                        f"{total} are held out; raise held_out_share, or set early_stopping to False")
    choosing, measured = split_by_prompt(held_out, 0.5, context.config.seed)
    number, least = len(unique_prompts(measured)), context.config.data.min_held_out
    few = f", fewer than data.min_held_out ({least}); raise held_out_share for a precise accuracy" if number < least else ""
    print(f"[{context.title}] {total - number} of the {total} held-out dialogues choose the weights, and the other {number} "
          f"measure the accuracy{few}", flush=True)
    return choosing, measured


def _human_pairs(context: StageContext, tokenizer: Tokenizer) -> tuple[list[Comparison], tuple[PreferenceReport, ...]]:
    """(the pairs of all files of `preference.human` with their weight, the report on each file)."""
    config, pairs, reports = context.config, [], []
    section, data = config.preference, config.data
    for number, path in enumerate(section.human, 1):
        file_pairs, report = read_preferences(
            Path(path).expanduser(),
            differing_contexts=data.differing_contexts,
            empty_answers=data.empty_answers,
            max_bad_share=data.max_bad_share,
            limit=data.limit,
            count_tokens=token_counter(tokenizer, config),
            max_tokens=min(section.max_length, config.model.max_length),
            source=f"{_HUMAN}{number}",
        )
        pairs += file_pairs
        reports.append(report)
        for sentence in report.sentences():
            print(f"[{context.title}] {sentence}", flush=True)
    return [dataclasses.replace(pair, weight=section.human_weight * pair.weight) for pair in pairs], tuple(reports)


def _with_human(
    context: StageContext, train: list[Comparison], held_out: list[Comparison], human: list[Comparison]
) -> tuple[list[Comparison], list[Comparison]]:
    """(training pairs, held-out pairs) with the human pairs, which are split in the same way, after the others.

    A dialogue that either split holds out is held out of both.
    """
    config = context.config
    human_train, human_held_out = split_by_prompt(
        human, config.preference.held_out_share, config.seed, config.data.min_held_out, where="config.preference.human",
        field="config.preference.held_out_share",
    )
    held = {pair.prompt.messages for pair in (*held_out, *human_held_out)}
    parts = [[], []]
    for pair in (*train, *held_out, *human_train, *human_held_out):
        parts[pair.prompt.messages in held].append(pair)
    if not parts[0]:
        raise UserError("no pair is left to train on: every dialogue is held out of stage compare's pairs or of "
                        "config.preference.human; lower config.preference.held_out_share")
    return parts[0], parts[1]
