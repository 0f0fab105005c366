"""The answers and labelled pairs that stages learn from: of earlier stages (the embedded world), or of files."""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.data.sources.base import SourceReport
from jaxalign.data.sources.splits import split_by_prompt
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.shards import Shards, prompt_row, row_prompt

Answered = tuple[Sequence[Message], str]
"""A dialogue and the answer to imitate."""

_FIELDS = (
    *("response_a", "response_b", "principles", "label", "label_ab"),
    *("label_ba", "decided", "reasoning_ab", "reasoning_ba"),
)


def comparison_row(comparison: Comparison) -> dict:
    """A labelled pair as a row of a shard."""
    return prompt_row(comparison.prompt) | {name: getattr(comparison, name) for name in _FIELDS}


def read_comparisons(shards: Shards, undecided: str) -> list[Comparison]:
    """The pairs to learn from: pairs of equal answers are left out, and undecided ones where `undecided` is "drop"."""
    out = []
    for row in shards.read():
        if row["response_a"] == row["response_b"] or (not row["decided"] and undecided == "drop"):
            continue
        fields = {name: row[name] for name in _FIELDS} | {"principles": tuple(row["principles"])}
        out.append(Comparison(row_prompt(row), **fields))
    return out


def labelled_pairs(context: StageContext) -> list[Comparison]:
    """The pairs of this run's compare stage to learn from. Raises UserError where there are none."""
    found = read_comparisons(Shards(context.input_directory("compare")), context.config.feedback.undecided)
    if not found:
        raise UserError(
            "stage compare left no pair to learn from: pairs of equal answers are left out, and undecided ones "
            "with feedback.undecided=drop; raise compare.prompts or compare.temperature"
        )
    return found


def labelled_split(
    context: StageContext, tokenizer: Tokenizer, held_out_share: float, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], SourceReport | None]:
    """(pairs to learn from, held-out pairs, report of the files); the report is None for answers of earlier stages.

    Args:
      held_out_share: of the world's pairs; files have `data.held_out_share`.
      margins: read the margins of the rows of files.
    """
    if not sources.made_in(context.config, "compare"):
        return sources.human_comparisons(context, tokenizer, margins=margins)
    return *split_by_prompt(labelled_pairs(context), held_out_share, context.config.seed), None


def preference_split(context: StageContext, tokenizer: Tokenizer):
    """`labelled_split` as the stage preference uses it."""
    section = context.config.preference
    return labelled_split(context, tokenizer, section.held_out_share, section.margin_weight > 0)


def direct_split(context: StageContext, tokenizer: Tokenizer):
    """`labelled_split` as the stage dpo uses it."""
    return labelled_split(context, tokenizer, context.config.dpo.held_out_share)


def answered(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Answered], list[Answered], SourceReport | None]:
    """(answers to imitate, held-out answers, report of the files); the report is None for answers of earlier stages."""
    if sources.made_in(context.config, "revise"):
        return *revisions(context), None
    train, held_out, report = sources.human_comparisons(context, tokenizer)
    return *([(c.prompt.messages, c.response_a) for c in pairs] for pairs in (train, held_out)), report


def revisions(context: StageContext) -> tuple[list[Answered], list[Answered]]:
    """(train, held out) of the complete revisions and helpful samples of stage revise; every 20th answer is held out."""
    rounds = context.config.revise.rounds
    found = []
    for row in Shards(context.input_directory("revise")).read():
        used = row["round"] == 0 or context.config.sft.rounds_used == "all" or row["round"] == rounds
        if row["complete"] and used:
            found.append((row_prompt(row).messages, row["revision"] if row["round"] else row["response"]))
    if len(found) < 2:
        raise UserError(
            f"{len(found)} of the answers and revisions of stage revise are complete, too few to learn from; raise "
            "revise.max_new_tokens, or train the base for longer (pretrain.steps)"
        )
    return [pair for i, pair in enumerate(found) if i % 20], found[::20]


def print_report(stage: str, report) -> dict:
    """Prints the sentences of a data report, if there is one, and returns its part of the stage's summary."""
    for sentence in report.sentences() if report else ():
        print(f"[{stage}] {sentence}", flush=True)
    return {"data": report.to_dict()} if report else {}
