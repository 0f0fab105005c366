"""Reads the rows that stages train on from the config's data source."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader, MixtureLoader
from jaxalign.data.sources.base import DataSource, SourceInputs, SourceReport, Split, read_rows
from jaxalign.data.sources.files import in_turn, named_files
from jaxalign.data.sources.splits import fit_answered, fit_prompts, split_by_prompt, unique_prompts
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.world.documents import Document
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Prompt
from jaxalign.registry.data_sources import DataSourceRecord, data_source
from jaxalign.stages.shared.base import StageContext


def data_files(config: Config) -> dict[Path, str]:
    """The files that the data source reads, with the config field that names each. A user's source file is one of them."""
    record, found = data_source(config), own_file(config)
    if record.rows or record.reads is None:
        named = {Path(path).expanduser(): "data.extra_train" for path in config.data.extra_train}
        found |= named | ({Path(config.data.train).expanduser(): "data.train"} if config.data.train else {})
    return found


def own_file(config: Config) -> dict[Path, str]:
    """The file of a source given as "FILE.py:name"."""
    place = config.data.source.rpartition(":")[0]
    return {Path(place).expanduser(): "data.source"} if place.endswith(".py") else {}


def made_in(config: Config, stage: str) -> tuple[str, ...]:
    """(stage,) if the run generates its own data by AI feedback, so that later stages read it from `stage`; else ()."""
    return (stage,) if data_source(config).feedback else ()


def human_comparisons(
    context: StageContext, tokenizer: Tokenizer, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], SourceReport | None]:
    """(train, held out, report) for the source's comparisons. Dialogues longer than preference.max_length are cut at a turn.

    margins: whether to read the margins of the rows; the selection of pairs does not depend on it.

    Raises:
      UserError: the source has no comparisons, or a row is not valid.
    """
    split = _answered(context, tokenizer, "comparisons", margins)
    return split.train, split.held_out, split.report


def human_judgements(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Judgement], list[Judgement], SourceReport | None]:
    """(train, held out, report) for the source's judged answers, which are cut as in `human_comparisons`."""
    split = _answered(context, tokenizer, "judgements")
    return split.train, split.held_out, split.report


def text(config: Config) -> Split[Document]:
    """The documents that a base is pretrained on."""
    return _checked(config, _made(SourceInputs(config), "text"), "text")


def prompts(context: StageContext, tokenizer: Tokenizer, purpose: str, count: int, max_new_tokens: int) -> list[Prompt]:
    """The first `count` prompts for a purpose, each with space for `max_new_tokens` after it.

    Args:
      context: the context of the stage that reads the prompts.
      tokenizer: the tokenizer of its model.
      purpose: "rl" for training prompts, "evaluate" for held-out prompts.
      count: the maximum number of prompts. A source marked `exact` must have at least that many.
      max_new_tokens: the longest response. Dialogues that leave less space are cut at a turn, which is reported on stdout.

    Raises:
      UserError: no prompt fits, an `exact` source has too few, or a row is not valid.
    """
    config, record = context.config, data_source(context.config)
    split, kind = _prompts(context, tokenizer, record), "prompts"
    source = split.held_out if purpose == "evaluate" else split.train
    if split.fitted:
        if record.exact and count > len(source):
            raise UserError(f"{count} {purpose} prompts are requested; config.data.source {record.name!r} has {len(source)}: "
                            f"lower config.{context.directory.name}.prompts")
        return read_rows(source, kind, _where(config), count)
    found, most = read_rows(source, kind, _where(config)), config.model.max_length - max_new_tokens
    fitted = fit_prompts(found, lambda m: len(styles.encode_prompt(tokenizer, m, config.data.style)), most)
    place = config.data.train or f"config.data.source {record.name!r}"
    if not fitted.prompts:
        if fitted.refused:
            raise UserError(f"the model's chat template rejects {len(fitted.refused)} of the {len(found)} {purpose} prompts of "
                            f"{place}, and none of the others fits into {most} tokens; correct their roles, or set "
                            "config.data.style to 'hh'")
        raise UserError(f"no {purpose} prompt of {place} fits into {most} tokens; raise model.max_length or, if no prompt is "
                        "held out, data.held_out_share")
    _report_fitting(context.directory.name, purpose, len(found), fitted, most)
    return in_turn(fitted.prompts, config)[:count]


def pair_loader(
    config: Config, pairs: Sequence[Comparison | Judgement], batch: int, stream: int, rows_per_pair: int = 1
) -> EpochLoader:
    """The loader for rows built from `pairs` in their order: every row in each epoch, or in proportion to config.data.weights.

    Raises:
      UserError: a file with a weight has no training pair, or the smallest weight gives less than one row per epoch.
    """
    rows = rows_per_pair * len(pairs)
    if not config.data.weights:
        return EpochLoader(rows, batch, config.seed, stream)
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
    return MixtureLoader(rows, batch, config.seed, stream, sizes, config.data.weights)


def _where(config: Config) -> str:
    return f"config.data.source {config.data.source!r}"


def _prompts(context: StageContext, tokenizer: Tokenizer, record: DataSourceRecord) -> Split[Prompt]:
    """The source's own prompts, or the distinct prompts of its comparisons or judgements."""
    config = context.config
    if record.prompts is not None:
        return _split(config, _made(SourceInputs(config), "prompts"), "prompts")
    split = _answered(context, tokenizer, "judgements" if record.comparisons is None else "comparisons")
    return Split(unique_prompts(split.train), unique_prompts(split.held_out))


def _answered(context: StageContext, tokenizer: Tokenizer, kind: str, margins: bool = False) -> Split:
    """The source's comparisons or judgements, checked and cut to the preference model's maximum length."""
    config = context.config

    def count(messages, answer: str) -> int:
        return len(styles.encode_completion(tokenizer, messages, answer, config.data.style)[0])

    most = min(config.preference.max_length, config.model.max_length)
    split = _checked(config, _made(SourceInputs(config, count, most, margins), kind), kind)
    if split.fitted:
        return split
    (train, dropped), (held_out, more) = (fit_answered(part, count, most) for part in (split.train, split.held_out))
    if not train:
        raise UserError(f"{_where(config)}: none of its {kind} fits into {most} tokens; raise config.preference.max_length and "
                        "config.model.max_length")
    if dropped + more:
        print(f"[{context.directory.name}] {dropped + more} of {len(split.train) + len(split.held_out)} {kind} were left out: "
              f"they do not fit into {most} tokens, or the model's chat template rejects them", flush=True)
    return Split(train, held_out, split.report, fitted=True)


def _made(inputs: SourceInputs, kind: str) -> Any:
    """The result of the source's function for a kind of rows. Raises UserError if a custom function raises an error."""
    function = data_source(inputs.config).load(kind)
    try:
        return function(inputs)
    except Exception as error:
        if isinstance(error, UserError) or getattr(function, "__module__", "").startswith("jaxalign."):
            raise
        raise UserError(f"{_where(inputs.config)}: building its {kind} raised {type(error).__name__}: {error}") from error


def is_judged(config: Config) -> bool:
    """Whether the source has single judged answers and no comparisons."""
    provides = data_source(config).provides
    return "judgements" in provides and "comparisons" not in provides


def _checked(config: Config, given: Any, kind: str) -> Split:
    """The result of a source's function as a split into lists of checked rows."""
    split = _split(config, given, kind)
    keep = config.data.empty_answers == "keep"
    train, held_out = (read_rows(part, kind, _where(config), keep_empty=keep) for part in (split.train, split.held_out))
    return Split(train, held_out, split.report, split.fitted)


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
            split = Split(*split_by_prompt(rows, config.data.held_out_share, config.seed)) if rows else Split([], [])
    if isinstance(split.train, DataSource) and not len(split.train):
        raise UserError(f"{_where(config)} has no {kind} to learn from; give at least one row")
    return split


def _report_fitting(stage: str, purpose: str, total: int, fitted, most: int) -> None:
    if fitted.too_long or fitted.cut:
        print(f"[{stage}] {len(fitted.cut)} of {total} {purpose} prompts lost their oldest turns and {len(fitted.too_long)} "
              f"were left out, since they exceed {most} tokens", flush=True)
    if fitted.refused:
        listed = ", ".join(fitted.refused[:5]) + (", ..." if len(fitted.refused) > 5 else "")
        print(f"[{stage}] {len(fitted.refused)} of {total} {purpose} prompts were left out, since the model's chat template "
              f"rejects them ({listed})", flush=True)
