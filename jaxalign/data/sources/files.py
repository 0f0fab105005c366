"""The data sources that read `config.data.train`: preference pairs, judged answers and prompts from JSONL."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.sources.base import SourceInputs, Split
from jaxalign.data.sources.jsonl import file_stem
from jaxalign.data.sources.judgements import read_judgements
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.sources.prompts import read_prompts
from jaxalign.data.sources.reports import MixtureReport
from jaxalign.data.sources.splits import split_by_prompt
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Prompt


def named_files(config: Config) -> dict[str, Path]:
    """The preference files, keyed by the `source` of their prompts: the file's name, or "human" for a single file.

    Raises:
      UserError: two files have the same name and folder.
    """
    paths = [Path(path).expanduser() for path in (config.data.train, *config.data.extra_train)]
    if len(paths) == 1:
        return {"human": paths[0]}
    for name in (file_stem, lambda path: f"{path.resolve().parent.name}/{file_stem(path)}"):
        named = {name(path): path for path in paths}
        if len(named) == len(paths):
            return named
    raise UserError(f"config.data.train and config.data.extra_train name the same file twice, or files with equal names in "
                    f"folders with equal names ({', '.join(map(str, paths))}); list each file once, and rename or move one")


def comparisons(inputs: SourceInputs) -> Split[Comparison]:
    """The pairs of all preference files, one file after another. `inputs.margins` does not affect which pairs are kept."""
    data, pairs, reports = inputs.config.data, [], []
    named = named_files(inputs.config)
    for name, path in named.items():
        found, report = read_preferences(
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
        )
        pairs += found
        reports.append(report)
    train, held_out = split_by_prompt(pairs, data.held_out_share, inputs.config.seed)
    return Split(train, held_out, reports[0] if len(reports) == 1 else MixtureReport(tuple(reports)), fitted=True)


def judgements(inputs: SourceInputs) -> Split[Judgement]:
    """The judged answers of the file."""
    data = inputs.config.data
    found, report = read_judgements(
        Path(data.train).expanduser(),
        empty_answers=data.empty_answers,
        max_bad_share=data.max_bad_share,
        limit=data.limit,
        count_tokens=inputs.count_tokens,
        max_tokens=inputs.max_tokens,
    )
    return Split(*split_by_prompt(found, data.held_out_share, inputs.config.seed), report, fitted=True)


def prompts(inputs: SourceInputs) -> Split[Prompt]:
    """The prompts of the file. Broken lines are reported on stdout."""
    data = inputs.config.data
    found, broken = read_prompts(Path(data.train).expanduser(), data.max_bad_share, data.limit, data.prompt_field)
    if broken:
        print(f"{data.train}: {len(found)} prompts read; {len(broken)} broken lines dropped, the first being line "
              f"{broken[0].line}: {broken[0].reason}", flush=True)
    return Split(*split_by_prompt(found, data.held_out_share, inputs.config.seed))


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
