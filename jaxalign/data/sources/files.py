"""The data sources that read the files of `config.data`: preference pairs, judged answers, demonstrations and prompts."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.sources.base import Prompted, PromptSets, SourceInputs, SourceReport, Split, few_dialogues, split_by_prompt
from jaxalign.data.sources.judgements import AnswerReader, read_judgements
from jaxalign.data.sources.preferences import PairOptions, PairReader, read_preferences
from jaxalign.data.sources.prompts import PromptFile, read_prompts, without
from jaxalign.data.sources.reports import MixtureReport
from jaxalign.data.sources.rows import data_stem, open_indexed_rows
from jaxalign.data.sources.window_rows import WindowRows
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Demonstration, Judgement, Prompt
from jaxalign.registry.data_sources import PROMPT_FILES


def named_files(config: Config) -> dict[str, Path]:
    """The preference files, keyed by the `source` of their prompts: the file's name, or "human" for a single file.

    Raises:
      UserError: two files have the same name and folder.
    """
    paths = [Path(path).expanduser() for path in (config.data.train, *config.data.extra_train)]
    if len(paths) == 1:
        return {"human": paths[0]}
    for name in (data_stem, lambda path: f"{path.resolve().parent.name}/{data_stem(path)}"):
        named = {name(path): path for path in paths}
        if len(named) == len(paths):
            return named
    raise UserError(f"config.data.train and config.data.extra_train name the same file twice, or files with equal names in "
                    f"folders with equal names ({', '.join(map(str, paths))}); list each file once, and rename or move one")


def comparisons(inputs: SourceInputs) -> Split[Comparison]:
    """The pairs of all preference files, one file after another. `inputs.margins` does not affect which pairs are kept."""
    data, parts, reports = inputs.config.data, [], []
    named = named_files(inputs.config)
    for name, path in named.items():
        rows, report = read_preferences(
            path,
            differing_contexts=data.differing_contexts,
            empty_answers=data.empty_answers,
            max_bad_share=data.max_bad_share,
            limit=data.limit,
            count_tokens=inputs.count_tokens,
            max_tokens=inputs.max_tokens,
            source=name,
            margins=inputs.margins,
            name=name if len(named) > 1 else None,
            columns=data.columns,
        )
        parts.append(rows)
        reports.append(report)
    report = reports[0] if len(reports) == 1 else MixtureReport(tuple(reports))
    pairs = parts[0] if len(parts) == 1 else [pair for part in parts for pair in part]
    return split_rows(inputs.config, pairs, report, fitted=True)


def judgements(inputs: SourceInputs) -> Split[Judgement]:
    """The judged answers of the file."""
    return _single_answers(inputs, judged=True)


def demonstrations(inputs: SourceInputs) -> Split[Demonstration]:
    """The answered dialogues of the file."""
    return _single_answers(inputs, judged=False)


def _single_answers(inputs: SourceInputs, judged: bool) -> Split:
    data = inputs.config.data
    rows, report = read_judgements(
        Path(data.train).expanduser(),
        judged=judged,
        empty_answers=data.empty_answers,
        max_bad_share=data.max_bad_share,
        limit=data.limit,
        count_tokens=inputs.count_tokens,
        max_tokens=inputs.max_tokens,
        columns=data.columns,
    )
    return split_rows(inputs.config, rows, report, fitted=True)


def window_rows(inputs: SourceInputs, kind: str) -> WindowRows:
    """The rows of the file of `config.data.train` by index. kind: "comparisons" or "demonstrations"."""
    data = inputs.config.data
    path, fit = Path(data.train).expanduser(), (inputs.count_tokens, inputs.max_tokens)
    reader: PairReader | AnswerReader
    if kind == "comparisons":
        options = PairOptions(data.differing_contexts, data.empty_answers, *fit, inputs.margins)
        reader = PairReader(data_stem(path), "human", options)
    else:
        reader = AnswerReader(data_stem(path), False, data.empty_answers == "keep", *fit)
    return WindowRows(open_indexed_rows(path, data.columns), reader)


def split_rows(config: Config, rows: Sequence[Prompted], report: SourceReport | None = None, fitted: bool = False) -> Split:
    """The rows of files, split by `config.data`. The other arguments are fields of `Split`."""
    data = config.data
    parts = split_by_prompt(rows, data.held_out_share, config.seed, data.min_held_out)
    return Split(*parts, report, fitted, few_dialogues(*parts, data.min_held_out))


def prompts(inputs: SourceInputs) -> PromptSets:
    """The prompts of the files in `config.data`: red_team, helpful, rl (or train) and eval.

    Without rl, the prompts of red_team and helpful are also those of reinforcement learning. Without eval, a share of the
    distinct dialogues of red_team and helpful, or of rl if neither is given, is held out for evaluation.

    Raises:
      UserError: a file cannot be read, or all of its prompts are evaluated and none is left to train on.
    """
    data, few = inputs.config.data, ""
    read: dict[str, PromptFile] = {}
    for name in PROMPT_FILES:
        if path := data.rl or data.train if name == "rl" else getattr(data, name):
            source, columns = "" if name == "rl" else name, name in ("rl", "eval")
            read[name] = read_prompts(
                Path(path).expanduser(), data.max_bad_share, data.limit, data.prompt_field, source, columns, data.columns
            )
    evaluated = read.pop("eval", None)
    if "red_team" in read and "helpful" in read:
        read["helpful"] = without(read["helpful"], read["red_team"].prompts, "in_red_team")
    trained = [name for name in ("red_team", "helpful") if name in read] or ["rl"]
    if evaluated is not None:
        held_out = evaluated.prompts
    else:
        split = split_rows(inputs.config, interleaved([read[name].prompts for name in trained]))
        held_out, few = split.held_out, split.few
    read = {name: without(file, held_out, "evaluated") for name, file in read.items()}
    train = {name: file.prompts for name, file in read.items()}
    for name, file in read.items():
        if not file.prompts and (name != "helpful" or len(read) == 1):
            raise UserError(f"all {file.report.prompts} prompts of {file.report.path} are used for evaluation, so none is left "
                            "to train on; give more prompts, or other ones in config.data.eval")
    return PromptSets(
        rl=train["rl"] if "rl" in train else interleaved([train[name] for name in trained]),
        evaluate=held_out,
        red_team=train.get("red_team"),
        helpful=train.get("helpful"),
        reports=tuple(file.report for file in (*read.values(), *((evaluated,) if evaluated else ()))),
        few=few,
    )


def interleaved(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompts of several lists, mixed so that every prefix has them in proportion to the lists' lengths."""
    placed = [((i + 0.5) / len(part), number, prompt) for number, part in enumerate(parts) for i, prompt in enumerate(part)]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]


def in_turn(prompts: Sequence[Prompt], config: Config) -> list[Prompt]:
    """Interleaves the prompts of several files in proportion to data.weights or, by default, to their numbers of prompts.

    Every prefix of the result has approximately these proportions.
    """
    if not config.data.extra_train:
        return list(prompts)
    counts = collections.Counter(prompt.source for prompt in prompts)
    shares = dict(zip(named_files(config), config.data.weights, strict=True)) if config.data.weights else counts
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for prompt in prompts:
        places.append((seen[prompt.source] + 0.5) / shares[prompt.source])
        seen[prompt.source] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=places.__getitem__)]
