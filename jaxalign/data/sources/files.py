"""The data sources that read preference pairs, judged answers and demonstrations from the files of `config.data`."""

from __future__ import annotations

from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.sources.base import SourceInputs, Split, split_rows
from jaxalign.data.sources.judgements import AnswerReader, read_judgements
from jaxalign.data.sources.preferences import PairOptions, PairReader, read_preferences
from jaxalign.data.sources.reports import MixtureReport
from jaxalign.data.sources.rows import data_stem, open_indexed_rows
from jaxalign.data.sources.window_rows import WindowRows
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Demonstration, Judgement


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
    return split_rows(inputs.config, pairs, ", ".join(map(str, named.values())), report, fitted=True)


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
    return split_rows(inputs.config, rows, report.path, report, fitted=True)


def window_rows(inputs: SourceInputs, kind: str) -> WindowRows:
    """The rows of the file of `config.data.train` by index. kind: "comparisons", "judgements" or "demonstrations"."""
    data = inputs.config.data
    path, fit = Path(data.train).expanduser(), (inputs.count_tokens, inputs.max_tokens)
    reader: PairReader | AnswerReader
    if kind == "comparisons":
        options = PairOptions(data.differing_contexts, data.empty_answers, *fit, inputs.margins)
        reader = PairReader(data_stem(path), "human", options)
    else:
        reader = AnswerReader(data_stem(path), kind == "judgements", data.empty_answers == "keep", *fit)
    return WindowRows(open_indexed_rows(path, data.columns), reader)
