"""Reads the rows and the prompts of stages from the config's data source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.sources.base import (
    DataSource,
    PromptSets,
    SourceInputs,
    SourceReport,
    Split,
    fit_prompts,
    read_rows,
    split_rows,
    unique_prompts,
)
from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.data.sources.prompts import in_turn, mixed
from jaxalign.data.sources.reports import MixtureReport
from jaxalign.data.sources.window_rows import WindowRows, prompts_of_answered
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.world.documents import Document
from jaxalign.errors import UserError
from jaxalign.records import Prompt
from jaxalign.registry.custom import custom_code
from jaxalign.registry.data_sources import data_source
from jaxalign.stages.shared import reads
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.fitting import (
    fit_rows,
    rejecting,
    report_fitting,
    token_counter,
    warn_of_shared,
    warn_of_shared_prompts,
)


def made_in(config: Config, stage: str) -> tuple[str, ...]:
    """(stage,) if later stages train on the rows of `stage`, revise or compare; () if they train on those of the source."""
    return (stage,) if stage in config.stages or data_source(config).feedback else ()


def in_windows(config: Config, maker: str) -> bool:
    """Whether a stage that trains on the rows of stage `maker`, or else on those of the source, reads them in windows."""
    return bool(config.data.window) and not made_in(config, maker)


def source_rows(
    context: StageContext, tokenizer: Tokenizer, kind: str, margins: bool = False
) -> tuple[list[Any], list[Any], SourceReport | None]:
    """(train, held out, report) for the source's rows of a kind.

    Dialogues are cut at a turn to preference.max_length, those of demonstrations to model.max_length.

    Args:
      kind: "comparisons", "judgements" or "demonstrations", which give the records of that name.
      margins: whether to read the margins of comparisons; the selection of pairs does not depend on it.

    Raises:
      UserError: the source has no such rows, or a row is not valid.
    """
    config = context.config
    # Not to sft.row_length, on which the split into train and held out would then depend in every stage that reads the prompts.
    most = config.model.max_length
    if kind != "demonstrations":
        most = min(config.preference.max_length, most)
    given = _build(SourceInputs(config, token_counter(tokenizer, config), most, margins), kind)
    split = _checked(config, given, kind)
    if isinstance(given, Split) and _is_custom(config, kind):
        warn_of_shared(context, [split.train], split.held_out)
    print_few(context, split.few)
    train, held_out = split.train, split.held_out
    if not split.fitted:
        train, held_out = fit_rows(context, tokenizer, (train, held_out), most, _where(config))
    return train, held_out, split.report


def open_window_rows(context: StageContext, tokenizer: Tokenizer, kind: str, margins: bool = False) -> WindowRows:
    """The rows of a kind by index. Raises UserError if the data is missing or cannot be read by index."""
    config, most = context.config, context.config.model.max_length
    if kind != "demonstrations":
        most = min(config.preference.max_length, most)
    inputs = SourceInputs(config, token_counter(tokenizer, config), most, margins)
    return data_source(config).load("windows")(inputs, kind)


def text(config: Config) -> Split[Document]:
    """The documents that a base is pretrained on."""
    return _checked(config, _build(SourceInputs(config), "text"), "text")


def prompts(
    context: StageContext, tokenizer: Tokenizer, purpose: str, count: int, max_new_tokens: int, sets: PromptSets | None = None
) -> list[Prompt]:
    """`count` prompts for a purpose, each with space for `max_new_tokens` after it: in the first round the first ones, in later
    rounds those of `first_prompt`.

    Args:
      context: the context of the stage that reads the prompts.
      tokenizer: the tokenizer of its model.
      purpose: one of `PURPOSES`; for "helpful", the result may be empty.
      count: the maximum number of prompts. A source marked `exact` must have at least that many.
      max_new_tokens: the longest response. Dialogues that leave less space are cut at a turn, which is reported on stdout.
      sets: the result of `prompt_sets`; None reads it.

    Raises:
      UserError: no prompt fits, an `exact` source has too few, it has none for this purpose, or a row is not valid.
    """
    config, record = context.config, data_source(context.config)
    sets, kind, stage = sets or prompt_sets(context, tokenizer), "prompts", context.directory.name
    source = sets.of(purpose)
    if source is None:
        if purpose == "helpful":
            return []
        raise UserError(f"{_where(config)} has no {purpose} prompts, which stage {stage} needs: set config.data.source to "
                        f"'prompts_jsonl' and config.data.{purpose} to a file, or remove the stage from config.stages")
    if sets.fitted:
        if record.exact and count > len(source):
            field = f"{stage}.{purpose}_prompts" if stage == "revise" else f"{stage}.prompts"
            raise UserError(f"{count} {purpose} prompts are requested; config.data.source {record.name!r} has {len(source)}: "
                            f"lower config.{field}")
        first = 0 if context.round == 1 else first_prompt(context.round, len(source), count)
        return read_rows(source, kind, _where(config), first + count)[first:]
    every, most = read_rows(source, kind, _where(config)), config.model.max_length - max_new_tokens
    fitted = fit_prompts(every, lambda m: len(styles.encode_prompt(tokenizer, m, config.data.style)), most)
    place = _place(config, purpose)
    if not every and purpose != "helpful":
        raise UserError(f"{place} has no {purpose} prompts; give more prompts"
                        + (", set config.data.eval, or raise config.data.held_out_share" if purpose == "evaluate" else ""))
    if every and not fitted.prompts:
        if fitted.refused:
            raise UserError(f"{rejecting(config)} {len(fitted.refused)} of the {len(every)} {purpose} prompts of {place} "
                            f"({fitted.reason}), and none of the others fits into {most} tokens; correct their roles, or "
                            "change config.data.style")
        raise UserError(f"no {purpose} prompt of {place} fits into {most} tokens; raise model.max_length")
    report_fitting(context, purpose, len(every), fitted, most)
    if config.data.window and len(fitted.prompts) < count:
        print(f"[{context.title}] warning: {len(fitted.prompts):,} {purpose} prompts are used, not the {count:,} of the "
              f"config, since config.data.window is {config.data.window:,}; raise it", flush=True)
    elif every and len(every) < count:
        print(f"[{context.title}] {len(fitted.prompts):,} {purpose} prompts are used, since there are fewer than the {count:,} "
              "of the config", flush=True)
    first = first_prompt(context.round, len(fitted.prompts), count)
    return in_turn(fitted.prompts, config)[first : first + count]


def first_prompt(number: int, total: int, count: int) -> int:
    """The first prompt of round `number`.

    Rounds read successive blocks of `count` of the `total` prompts of a set, and begin again when no whole block is left.
    """
    return (number - 1) % max(1, total // max(1, count)) * count


def prompt_sets(context: StageContext, tokenizer: Tokenizer) -> PromptSets:
    """The source's own prompts by purpose, or the distinct prompts of its answered rows.

    The reports on the files that were read are printed.
    """
    config, record = context.config, data_source(context.config)
    if record.prompts is None:
        kind = next(kind for kind in ("comparisons", "judgements", "demonstrations") if getattr(record, kind) is not None)
        if not config.data.window:
            train, held_out, report = source_rows(context, tokenizer, kind)
            files = report.files if isinstance(report, MixtureReport) else (report,) if report else ()
            given = PromptSets(unique_prompts(train), unique_prompts(held_out), reports=files)
        else:
            given = prompts_of_answered(open_window_rows(context, tokenizer, kind), config.data, config.seed)
    else:
        given = _build(SourceInputs(config), "prompts")
        if _is_custom(config, "prompts"):
            warn_of_shared_prompts(context, given, _where(config))
    if isinstance(given, PromptSets):
        for sentence in (sentence for report in given.reports for sentence in report.sentences()):
            print(f"[{context.title}] {sentence}", flush=True)
        print_few(context, given.few)
        return given
    split = _split(config, given, "prompts")
    print_few(context, split.few)
    return PromptSets(split.train, split.held_out, fitted=split.fitted)


def print_few(context: StageContext, few: str) -> None:
    """Prints the sentence of `Split.few`, if there is one."""
    if few:
        print(f"[{context.title}] {few}", flush=True)


def data_summary(sets: PromptSets) -> dict[str, Any]:
    """The part of a stage's summary about the files that gave its prompts; empty if no file was read."""
    return {"data": {"files": [report.to_dict() for report in sets.reports]}} if sets.reports else {}


def _where(config: Config) -> str:
    return f"config.data.source {config.data.source!r}"


def _place(config: Config, purpose: str) -> str:
    """The files that hold the prompts of a purpose, or the source, for error messages."""
    files, own = reads.data_files(config), f"data.{'eval' if purpose == 'evaluate' else purpose}"
    named = [path for path, field in files.items() if field == own]
    return " and ".join(map(str, named or [path for path, field in files.items() if field != "data.eval"])) or _where(config)


def _build(inputs: SourceInputs, kind: str) -> Any:
    """The result of the source's function for a kind of rows. Raises UserError if a custom function raises an error."""
    function = data_source(inputs.config).load(kind)
    if not _is_custom(inputs.config, kind):
        return function(inputs)
    with custom_code(f"{_where(inputs.config)}: building its {kind}"):
        return function(inputs)


def _is_custom(config: Config, kind: str) -> bool:
    """Whether the source's function for a kind of rows is the user's."""
    return not getattr(data_source(config).load(kind), "__module__", "").startswith("jaxalign.")


def is_judged(config: Config) -> bool:
    """Whether the source has single judged answers and no comparisons."""
    provides = data_source(config).provides
    return "judgements" in provides and "comparisons" not in provides


def _checked(config: Config, given: Any, kind: str) -> Split:
    """The result of a source's function as a split into checked rows. Records of tables were checked by their reader."""
    split = _split(config, given, kind)
    keep = config.data.empty_answers == "keep"
    train, held_out = (
        part if isinstance(part, LazyRecords) else read_rows(part, kind, _where(config), keep_empty=keep)
        for part in (split.train, split.held_out)
    )
    return dataclasses.replace(split, train=train, held_out=held_out)


def _split(config: Config, given: Any, kind: str) -> Split:
    """The rows as a split. Rows that the source has not split are split by a hash of their dialogue, text by position.

    Raises:
      UserError: the source has no training rows.
    """
    if isinstance(given, Split):
        split = given
    else:
        rows = read_rows(given, kind, _where(config), keep_empty=config.data.empty_answers == "keep")
        if rows and kind == "text":
            number = min(len(rows) - 1, max(1, round(config.data.held_out_share * len(rows))))
            split = Split(rows[number:], rows[:number])
        else:
            split = split_rows(config, rows, _where(config)) if rows else Split([], [])
    if isinstance(split.train, DataSource) and not len(split.train):
        raise UserError(f"{_where(config)} has no {kind} to learn from; give at least one row")
    return split


def stage_prompts(
    context: StageContext, tokenizer: Tokenizer, stage: str, purpose: str, sets: PromptSets | None = None,
    without: Sequence[Prompt] = (),
) -> list[Prompt]:
    """The prompts of stage compare or ppo, of which `helpful_share` of its section are prompts of `config.data.helpful`.

    A share takes the first prompts of both kinds, in proportion in every prefix. If there are too few of one kind, fewer of the
    other are used, so that the share holds.

    Args:
      context: the stage's context.
      tokenizer: the tokenizer of its model.
      stage: the name of the config section, with prompts, max_new_tokens and helpful_share.
      purpose: "compare" or "rl".
      sets: the result of `prompt_sets`; None reads it.
      without: prompts whose dialogues are left out.

    Raises:
      UserError: as for `prompts`, or a share cannot be reached.
    """
    section = getattr(context.config, stage)
    sets = sets or prompt_sets(context, tokenizer)
    excluded = {prompt.messages for prompt in without}
    if section.helpful_share is None:
        count = section.prompts if not excluded or sets.fitted else len(sets.of(purpose))
        every = prompts(context, tokenizer, purpose, count, section.max_new_tokens, sets)
        usable = [prompt for prompt in every if prompt.messages not in excluded][: section.prompts]
        if not usable:
            raise UserError(f"all {purpose} prompts of stage {stage} are held out for config.ppo.alarms; lower its prompts, or "
                            "give more prompts")
        return usable
    helpful = [prompt for prompt in all_helpful(context, tokenizer, sets, section.max_new_tokens)
               if prompt.messages not in excluded]
    kinds = {prompt.messages for prompt in helpful} | excluded
    every = prompts(context, tokenizer, purpose, len(sets.of(purpose)), section.max_new_tokens, sets)
    return mixed([prompt for prompt in every if prompt.messages not in kinds], helpful, section.helpful_share, section.prompts,
                 f"config.{stage}.helpful_share")


def all_helpful(context: StageContext, tokenizer: Tokenizer, sets: PromptSets, max_new_tokens: int) -> list[Prompt]:
    """All helpful prompts of the source that fit; empty if it has none."""
    source = sets.of("helpful")
    return [] if source is None else prompts(context, tokenizer, "helpful", len(source), max_new_tokens, sets)


def held_out_helpful(context: StageContext, tokenizer: Tokenizer, sets: PromptSets) -> list[Prompt]:
    """The prompts that `config.ppo.alarms` measures: the last helpful prompts of the source, at most half of them.

    Raises:
      UserError: the source has fewer than two.
    """
    config = context.config
    helpful = all_helpful(context, tokenizer, sets, config.ppo.max_new_tokens)
    if len(helpful) < 2:
        raise UserError(f"config.ppo.alarms.every is {config.ppo.alarms.every}, which needs helpful prompts to measure, but "
                        f"config.data.source {config.data.source!r} has {len(helpful)}: set config.data.helpful to a file of "
                        "prompts, or alarms.every to 0")
    count = min(config.ppo.alarms.prompts, len(helpful) // 2)
    # Columns belong to the prompts of RL; the reward scores these prompts without.
    return [dataclasses.replace(prompt, columns={}) for prompt in helpful[-count:]]
