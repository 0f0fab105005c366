"""The answers and labelled pairs that stages train on, from earlier stages (revise, compare) or from files."""

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
    """The training pairs. Pairs of equal answers are left out and, if `undecided` is "drop", undecided pairs."""
    out = []
    for row in shards.read():
        if row["response_a"] == row["response_b"] or (not row["decided"] and undecided == "drop"):
            continue
        fields = {name: row[name] for name in _FIELDS} | {"principles": tuple(row["principles"])}
        out.append(Comparison(row_prompt(row), **fields))
    return out


def labelled_pairs(context: StageContext) -> list[Comparison]:
    """The training pairs from this run's compare stage. Raises UserError if there are none."""
    found = read_comparisons(Shards(context.input_directory("compare")), context.config.feedback.undecided)
    if not found:
        raise UserError(
            "stage compare has no pair to train on: identical answers are excluded, and so are undecided pairs if "
            "feedback.undecided is 'drop'; raise compare.prompts or compare.temperature"
        )
    return found


def labelled_split(
    context: StageContext, tokenizer: Tokenizer, held_out_share: float, max_length: int, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], SourceReport | None]:
    """(training pairs, held-out pairs, report on the files); the report is None for answers from earlier stages.

    Args:
      held_out_share: the share of stage compare's pairs to hold out; for files, `data.held_out_share` applies.
      max_length: the maximum length of a dialogue with its answer, in tokens, for the pairs of stage compare.
      margins: whether to read the margins of rows in files.
    """
    if not sources.made_in(context.config, "compare"):
        return sources.human_comparisons(context, tokenizer, margins=margins)
    pairs = sources.fitting(context, tokenizer, labelled_pairs(context), max_length, "stage compare")
    return *split_by_prompt(pairs, held_out_share, context.config.seed), None


def preference_split(context: StageContext, tokenizer: Tokenizer):
    """`labelled_split` with the settings of stage preference."""
    section = context.config.preference
    return labelled_split(context, tokenizer, section.held_out_share, section.max_length, section.margin_weight > 0)


def direct_split(context: StageContext, tokenizer: Tokenizer):
    """`labelled_split` with the settings of stage dpo."""
    section = context.config.dpo
    return labelled_split(context, tokenizer, section.held_out_share, section.max_length)


def answered(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Answered], list[Answered], SourceReport | None]:
    """(answers to imitate, held-out answers, report on the files); the report is None for answers from earlier stages."""
    if sources.made_in(context.config, "revise"):
        return *revisions(context), None
    train, held_out, report = sources.human_comparisons(context, tokenizer)
    return *([(c.prompt.messages, c.response_a) for c in pairs] for pairs in (train, held_out)), report


def revisions(context: StageContext) -> tuple[list[Answered], list[Answered]]:
    """(train, held out): the complete revisions and helpful samples of stage revise. Every 20th answer is held out."""
    rounds = context.config.revise.rounds
    found = []
    for row in Shards(context.input_directory("revise")).read():
        used = row["round"] == 0 or context.config.sft.rounds_used == "all" or row["round"] == rounds
        if row["complete"] and used:
            found.append((row_prompt(row).messages, row["revision"] if row["round"] else row["response"]))
    if len(found) < 2:
        raise UserError(
            f"only {len(found)} answers and revisions of stage revise are complete, too few to train on; raise "
            "revise.max_new_tokens, or start from a base model that ends its answers (after pretrain: raise pretrain.steps)"
        )
    return [pair for i, pair in enumerate(found) if i % 20], found[::20]


def print_report(stage: str, report) -> dict:
    """Prints the sentences of a data report, if any, and returns its part of the stage's summary."""
    for sentence in report.sentences() if report else ():
        print(f"[{stage}] {sentence}", flush=True)
    return {"data": report.to_dict()} if report else {}
