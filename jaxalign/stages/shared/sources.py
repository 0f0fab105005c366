"""Where a stage's prompts, answers and comparisons come from: the embedded world, arithmetic, or a file."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader, MixtureLoader
from jaxalign.data.sources.judgements import JudgementReport, read_judgements
from jaxalign.data.sources.preferences import (
    MixtureReport,
    PreferenceReport,
    file_stem,
    fit_prompts,
    read_preferences,
    split_by_prompt,
    unique_prompts,
)
from jaxalign.data.sources.prompts import read_prompts, split_prompts
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Prompt
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import StageContext


def data_files(config: Config) -> dict[Path, str]:
    """The outside files of the data source."""
    if config.data.source in ("world", "arithmetic"):
        return {}
    extra = {Path(path).expanduser(): "data.extra_train" for path in config.data.extra_train}
    return extra | {Path(config.data.train).expanduser(): "data.train"}


def _named_files(config: Config) -> dict[str, Path]:
    """The preference files by the name that their prompts have as source: "human" for one alone."""
    paths = [Path(path).expanduser() for path in (config.data.train, *config.data.extra_train)]
    if len(paths) == 1:
        return {"human": paths[0]}
    for name in (file_stem, lambda path: f"{path.resolve().parent.name}/{file_stem(path)}"):
        named = {name(path): path for path in paths}
        if len(named) == len(paths):
            return named
    raise UserError(f"config.data.train and config.data.extra_train name the same file twice, or files that differ in neither "
                    f"name nor folder ({', '.join(map(str, paths))}); give each once, and rename or move one")


def human_comparisons(
    context: StageContext, tokenizer: Tokenizer, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], PreferenceReport | MixtureReport]:
    """(train, held out, report) of the preference files. Dialogues longer than preference.max_length are cut at a turn.

    Files come one after another. Only with `margins` are those of the rows read; which pairs there are does not depend on
    it.
    """
    data, pairs, reports = context.config.data, [], []

    def count(messages, answer: str) -> int:
        return len(styles.encode_completion(tokenizer, messages, answer, data.style)[0])

    named = _named_files(context.config)
    for name, path in named.items():
        found, report = read_preferences(
            path,
            differing_contexts=data.differing_contexts,
            empty_answers=data.empty_answers,
            max_bad_share=data.max_bad_share,
            limit=data.limit,
            count_tokens=count,
            max_tokens=min(context.config.preference.max_length, context.config.model.max_length),
            source=name,
            margins=margins,
            name=name if len(named) > 1 else None,
        )
        pairs += found
        reports.append(report)
    train, held_out = split_by_prompt(pairs, data.held_out_share, context.config.seed)
    return train, held_out, reports[0] if len(reports) == 1 else MixtureReport(tuple(reports))


def human_judgements(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Judgement], list[Judgement], JudgementReport]:
    """(train, held out, report) of a file of single judged answers, cut as `human_comparisons` cuts pairs."""
    config = context.config
    found, report = read_judgements(
        Path(config.data.train).expanduser(),
        empty_answers=config.data.empty_answers,
        max_bad_share=config.data.max_bad_share,
        limit=config.data.limit,
        count_tokens=lambda messages, text: len(styles.encode_completion(tokenizer, messages, text, config.data.style)[0]),
        max_tokens=min(config.preference.max_length, config.model.max_length),
    )
    return *split_by_prompt(found, config.data.held_out_share, config.seed), report


def pair_loader(
    config: Config, pairs: Sequence[Comparison | Judgement], batch: int, stream: int, rows_per_pair: int = 1
) -> EpochLoader:
    """The loader of rows made from `pairs` in their order: all of them each epoch, or by config.data.weights.

    Raises UserError where a file that has a weight has no pair to learn from.
    """
    rows = rows_per_pair * len(pairs)
    if not config.data.weights or config.data.source == "world":
        return EpochLoader(rows, batch, config.seed, stream)
    counts = collections.Counter(pair.prompt.source for pair in pairs)
    named = _named_files(config)
    for name, path in named.items():
        if not counts[name]:
            raise UserError(f"{path} has a weight in config.data.weights but no pair to train on is left of it; leave the file "
                            "out, or lower config.data.held_out_share")
    least = min(config.data.weights) / sum(config.data.weights) * rows
    if least < 1:
        raise UserError(f"the smallest of config.data.weights {config.data.weights} is less than one of the {rows} rows of an "
                        "epoch; raise it, or leave its file out")
    sizes = tuple(rows_per_pair * counts[name] for name in named)
    return MixtureLoader(rows, batch, config.seed, stream, sizes, config.data.weights)


def _in_turn(prompts: Sequence[Prompt], config: Config) -> list[Prompt]:
    """Prompts of several files in turn, by the files' weights or their numbers of prompts, so that any beginning is mixed."""
    if not config.data.extra_train:
        return list(prompts)
    counts = collections.Counter(prompt.source for prompt in prompts)
    shares = dict(zip(_named_files(config), config.data.weights, strict=True)) if config.data.weights else counts
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for prompt in prompts:
        places.append((seen[prompt.source] + 0.5) / shares[prompt.source])
        seen[prompt.source] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=places.__getitem__)]


def prompts(context: StageContext, tokenizer: Tokenizer, purpose: str, count: int, max_new_tokens: int) -> list[Prompt]:
    """Prompts for "rl" (training) or "evaluate" (held out); those of a file are cut at a turn to leave room for the answer."""
    config, held = context.config, purpose == "evaluate"
    if config.data.source == "world":
        return common.world_of(config).prompts(purpose, count)
    if config.data.source == "arithmetic":
        problems = common.arithmetic_of(config)
        return problems.prompts("held_out" if held and problems.problems("held_out") else "train", count)
    if config.data.source == "prompts_jsonl":
        found = file_prompts(config)[held]
    elif config.data.source == "judgements_jsonl":
        found = unique_prompts(human_judgements(context, tokenizer)[held])
    else:
        train, held_out, _ = human_comparisons(context, tokenizer)
        found = unique_prompts(held_out if held else train)
    room = config.model.max_length - max_new_tokens
    fitted = fit_prompts(found, lambda m: len(styles.encode_prompt(tokenizer, m, config.data.style)), room)
    if not fitted.prompts:
        if fitted.refused:
            raise UserError(f"the model's chat template refuses {len(fitted.refused)} of the {len(found)} {purpose} prompts of "
                            f"{config.data.train}, and no other fits into {room} tokens; mend their roles, or set "
                            "config.data.style to 'hh'")
        raise UserError(f"no {purpose} prompt of {config.data.train} fits into {room} tokens; raise model.max_length, or "
                        "data.held_out_share where none is held out")
    if fitted.too_long or fitted.cut:
        print(f"[{context.directory.name}] of {len(found)} {purpose} prompts {len(fitted.cut)} lost their oldest turns and "
              f"{len(fitted.too_long)} were left out, being longer than {room} tokens", flush=True)
    if fitted.refused:
        listed = ", ".join(fitted.refused[:5]) + (", ..." if len(fitted.refused) > 5 else "")
        print(f"[{context.directory.name}] of {len(found)} {purpose} prompts {len(fitted.refused)} were left out, as the "
              f"model's chat template refuses them ({listed})", flush=True)
    return _in_turn(fitted.prompts, config)[:count]


def file_prompts(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) of the prompt file."""
    data = config.data
    found, broken = read_prompts(Path(data.train).expanduser(), data.max_bad_share, data.limit, data.prompt_field)
    if broken:
        print(f"{data.train}: {len(found)} prompts read; {len(broken)} broken lines left out, the first being line "
              f"{broken[0].line}: {broken[0].reason}", flush=True)
    return split_prompts(found, data.held_out_share, config.seed)
