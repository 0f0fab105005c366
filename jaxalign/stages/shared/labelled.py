"""The answers and labelled pairs that stages train on, from earlier stages (revise, compare) or from files."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxalign.config import Config, DPOConfig, PreferenceConfig, SFTConfig
from jaxalign.data.loader import EpochLoader, MixtureLoader
from jaxalign.data.sources.base import SourceReport, few_dialogues, few_held_out, held_out_count, split_by_prompt
from jaxalign.data.sources.files import named_files
from jaxalign.data.sources.lazy import LazyRecords, distinct_pairs
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.critique import count_outcomes, is_usable
from jaxalign.reasons import COMPARISON, advice, few_usable, too_few, usable_sentence
from jaxalign.records import Comparison, Demonstration, Judgement, Message, PrincipleLabel
from jaxalign.registry.data_sources import data_source
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.fitting import fit_rows
from jaxalign.stages.shared.shards import Shards, prompt_row, row_prompt

Answered = tuple[Sequence[Message], str]
"""A dialogue and the answer to imitate."""

_FIELDS = (
    *("response_a", "response_b", "principles", "label", "label_ab"),
    *("label_ba", "decided", "reasoning_ab", "reasoning_ba"),
)


_MORE = ("problem", "outside", "notes", "disagreement", "principle", "outcome", "incomplete")
"""Fields of a row that are absent if they are empty."""


def comparison_row(comparison: Comparison) -> dict:
    """A labelled pair as a row of a shard."""
    fields = {name: getattr(comparison, name) for name in _FIELDS}
    more = {name: value for name in _MORE if (value := getattr(comparison, name)) not in (None, ())}
    more |= {} if comparison.weight == 1 else {"weight": comparison.weight}
    labels = [{name: value for name, value in vars(label).items() if value is not None} for label in comparison.labels]
    return prompt_row(comparison.prompt) | fields | more | {"labels": labels}


def row_comparison(row: Mapping[str, Any]) -> Comparison:
    """The labelled pair of a row that `comparison_row` made."""
    fields = {name: row[name] for name in _FIELDS} | {name: row[name] for name in (*_MORE, "weight") if name in row}
    fields |= {name: tuple(fields[name]) for name in ("principles", "notes", "incomplete") if name in fields}
    labels = tuple(PrincipleLabel(**label) for label in row.get("labels", ()))
    return Comparison(row_prompt(row), **fields, labels=labels)


def read_comparisons(shards: Shards, undecided: str, undecided_weight: float = 1.0) -> list[Comparison]:
    """The training pairs, without pairs of equal answers.

    Args:
      shards: the rows of stage compare.
      undecided: "drop" leaves out undecided pairs, "half" keeps them.
      undecided_weight: the weight of an undecided pair's loss.
    """
    out = []
    for row in shards.read():
        if row["response_a"] == row["response_b"] or (not row["decided"] and undecided == "drop"):
            continue
        pair = row_comparison(row)
        out.append(pair if pair.decided else dataclasses.replace(pair, weight=pair.weight * undecided_weight))
    return out


def labelled_pairs(context: StageContext) -> list[Comparison]:
    """The training pairs from this run's compare stage. Raises UserError if there are none, or if their share is below
    `feedback.required_share`."""
    shards, feedback = Shards(context.input_directory("compare")), context.config.feedback
    pairs = read_comparisons(shards, feedback.undecided, feedback.undecided_weight)
    outcomes = [row.get("outcome") for row in shards.read()]
    few = too_few(len(outcomes), len(pairs), "feedback.required_share", feedback.required_share)
    if few or not pairs:
        reasons = count_outcomes(outcomes)
        sentence = usable_sentence("pairs of stage compare", len(outcomes), len(pairs), reasons, known=COMPARISON)
        raise UserError(f"{few}: {sentence}; {advice(reasons, COMPARISON)}" if pairs else
                        f"{sentence}; {advice(reasons, COMPARISON)}")
    return pairs


def labelled_split(
    context: StageContext, tokenizer: Tokenizer, section: PreferenceConfig | DPOConfig, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], SourceReport | None]:
    """(training pairs, held-out pairs, report on the files); the report is None for answers from earlier stages.

    Args:
      section: has, for the pairs of stage compare, held_out_share, the share to hold out, and max_length, the maximum length
        of a dialogue with its answer in tokens. For files, `data.held_out_share` applies.
      margins: whether to read the margins of rows in files.
    """
    if not sources.made_in(context.config, "compare"):
        return sources.source_rows(context, tokenizer, "comparisons", margins)
    (pairs,) = fit_rows(context, tokenizer, (labelled_pairs(context),), section.max_length, "stage compare")
    minimum = context.config.data.min_held_out
    field = f"config.{'preference' if isinstance(section, PreferenceConfig) else 'dpo'}.held_out_share"
    train, held_out = split_by_prompt(
        pairs, section.held_out_share, context.config.seed, minimum, where="the pairs of stage compare", field=field
    )
    sources.print_few(context, few_dialogues(train, held_out, minimum))
    return train, held_out, None


def held_out_once(context: StageContext, held_out: Sequence[Comparison]) -> Sequence[Comparison]:
    """The held-out pairs without repeated ones, whose number is printed: an interval takes its pairs to be independent."""
    distinct = distinct_pairs(held_out)
    repeated = len(held_out) - len(distinct)
    if repeated:
        print(f"[{context.title}] {repeated:,} of {len(held_out):,} held-out pairs repeat others and are counted once",
              flush=True)
    return distinct


def pair_loader(
    context: StageContext, pairs: Sequence[Comparison | Judgement], batch: int, stream: int, rows_per_pair: int = 1
) -> EpochLoader:
    """The loader for rows built from `pairs` in their order: every row in each epoch, or in proportion to config.data.weights.

    Raises:
      UserError: a file with a weight has no training pair, or the smallest weight gives less than one row per epoch.
    """
    config, seed, rows = context.config, context.stream_seed, rows_per_pair * len(pairs)
    if not config.data.weights:
        return EpochLoader(rows, batch, seed, stream)
    counts = collections.Counter(pair.prompt.source for pair in pairs)
    named = named_files(config)
    for name, path in named.items():
        if not counts[name]:
            raise UserError(f"{path} has a weight in config.data.weights but no training pair is left in it; leave the file "
                            "out, or lower config.data.held_out_share")
    least = min(config.data.weights) / sum(config.data.weights) * rows
    if least < 1:
        raise UserError(f"the smallest of config.data.weights {config.data.weights} gives its file less than one of the {rows} "
                        "rows of an epoch; raise it, or leave the file out")
    sizes = tuple(rows_per_pair * counts[name] for name in named)
    return MixtureLoader(rows, batch, seed, stream, sizes, config.data.weights)


def answered(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Answered], list[Answered], SourceReport | RevisionReport]:
    """(answers to imitate, held-out answers, report on the rows of stage revise or on the files)."""
    if sources.made_in(context.config, "revise"):
        train, held_out, report = revision_split(context)
        return list(map(row_answer, train)), list(map(row_answer, held_out)), report
    train, held_out, report = sources.source_rows(context, tokenizer, answer_kind(context.config))
    return *(rows.mapped(answer_of) if isinstance(rows, LazyRecords) else list(map(answer_of, rows))
             for rows in (train, held_out)), report


def answer_kind(config: Config) -> str:
    """The kind of the source's rows whose answers stage sft imitates."""
    return "demonstrations" if "demonstrations" in data_source(config).provides else "comparisons"


def answer_of(row: Comparison | Demonstration) -> Answered:
    """The dialogue and the answer to imitate."""
    return row.prompt.messages, row.response if isinstance(row, Demonstration) else row.response_a


@dataclasses.dataclass(frozen=True)
class RevisionReport:
    """The rows of stage revise: how many there are, how many can be trained on, and why the others cannot.

    Attributes:
      total: the number of rows in the rounds that `sft.rounds_used` selects.
      usable: the number of rows to train on, including those held out.
      reasons: the number of other rows by outcome (`reasons.REVISION`).
      kept: the number of usable rows by outcome, without ordinary ones: those that `sft.keep` names.
    """

    total: int
    usable: int
    reasons: dict[str, int]
    kept: dict[str, int]

    def sentences(self) -> list[str]:
        """The report in words."""
        return [usable_sentence("answers and revisions", self.total, self.usable, self.reasons, self.kept)]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, with the share of usable rows."""
        return dataclasses.asdict(self) | {"share": self.usable / max(1, self.total)}


def revision_report(config: Config, rows: Iterable[Mapping[str, Any]]) -> RevisionReport:
    """Counts the rows of stage revise that sft uses."""
    usable, others = revision_rows(config, rows)
    reasons, kept = (count_outcomes(row.get("outcome") for row in part) for part in (others, usable))
    return RevisionReport(len(usable) + len(others), len(usable), reasons, kept)


def revision_rows(
    config: Config, rows: Iterable[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(the rows of stage revise that can be trained on, the others), of the rounds that `sft.rounds_used` selects."""
    usable, others = [], []
    for row in rows:
        if row["round"] == 0 or config.sft.rounds_used == "all" or row["round"] == config.revise.rounds:
            (usable if is_usable(row.get("outcome"), config.sft.keep) else others).append(row)
    return usable, others


def row_answer(row: Mapping[str, Any]) -> Answered:
    """The dialogue and the answer to imitate of a row of stage revise."""
    return row_prompt(row).messages, row["revision"] if row["round"] else row["response"]


def revision_split(
    context: StageContext,
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], RevisionReport]:
    """(train, held out, report): the usable rows of stage revise.

    Every 20th row is held out, or more of them, at equal distances, to reach `data.min_held_out`.

    Raises:
      UserError: fewer than `sft.required_rows`, a smaller share than `sft.required_share`, or fewer than 2 can be used.
    """
    config = context.config
    rows = list(Shards(context.input_directory("revise")).read())
    report = revision_report(config, rows)
    usable, _ = revision_rows(config, rows)
    required = config.sft.required_rows
    if len(usable) < max(2, required):
        needed = f"sft.required_rows is {required}" if required > 1 else "sft needs at least 2 rows"
        raise UserError(f"{needed}, but {report.sentences()[0]}; {advice(report.reasons)}")
    few = too_few(report.total, report.usable, "sft.required_share", config.sft.required_share)
    if few:
        raise UserError(f"{few}: {report.sentences()[0]}; {advice(report.reasons)}")
    total, every, minimum = len(usable), range(0, len(usable), 20), config.data.min_held_out
    count = held_out_count(total, len(every), minimum)
    held = set(every if count == len(every) else (i * total // count for i in range(count)))
    sources.print_few(context, few_held_out(total, count, minimum, "answers"))
    return [row for i, row in enumerate(usable) if i not in held], [usable[i] for i in sorted(held)], report


def warn_about_few(stage: str, section: SFTConfig, total: int, usable: int) -> None:
    """Warns if the usable rows are fewer than `min_rows`, or a smaller share of all rows than `min_share`."""
    sentence = few_usable(section, total, usable)
    if sentence:
        print(f"[{stage}] warning: {sentence}", flush=True)


def print_report(stage: str, report) -> dict:
    """Prints the sentences of a data report, if any, and returns its part of the stage's summary."""
    for sentence in report.sentences() if report else ():
        print(f"[{stage}] {sentence}", flush=True)
    return {"data": report.to_dict()} if report else {}
