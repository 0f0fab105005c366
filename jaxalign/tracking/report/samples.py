"""Answers to the same held-out prompts during RL, as the alarms of RL measured them (`config.ppo.alarms`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxalign.config import rounds
from jaxalign.tracking.formatting import decimal
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.report.blocks import ReportSection
from jaxalign.tracking.report.examples import AnsweredPrompt, ModelAnswer, Tag
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_FILE = re.compile(r"alarm-answers-(\d+)\.jsonl")
_COLUMNS, _PROMPTS = 4, 4
_LONG = 20  # Iterations of RL from which `alarms.every=10` records more than the first and the last answers.


def rl_samples(run: RunFiles) -> list[ReportSection]:
    """For each round, the answers to the first prompts before RL, at its newest measurement, and at two between; no section
    without files."""
    return [_samples(files, number) for number in (1, *run.later) if (files := _files(run, number))]


def without_samples(run: RunFiles) -> str:
    """A sentence on how to record answers during RL, for a run with helpful prompts that is long enough to have answers to
    show; else ""."""
    data = run.config.get("data") or {}
    helpful = data.get("source") == "world" or data.get("helpful")
    if len(run.stage("ppo").metrics) < _LONG or _files(run, 1) or not helpful:
        return ""
    return ("Answers during RL were not recorded; config.ppo.alarms.every=10 records those to held-out helpful prompts "
            "(docs/ppo.md).")


def _files(run: RunFiles, number: int) -> dict[int, Path]:
    """The files of a round by the iteration of RL."""
    paths = (run.path / rounds.folder("ppo", number)).glob("alarm-answers-*.jsonl")
    return {int(match[1]): path for path in paths if (match := _FILE.fullmatch(path.name))}


def _samples(files: Mapping[int, Path], number: int) -> ReportSection:
    iterations = sorted(files)
    most = min(_COLUMNS, len(iterations))
    shown = [iterations[round(index * (len(iterations) - 1) / max(1, most - 1))] for index in range(most)]
    answers = [{row["prompt_id"]: row for row in read_rows(files[iteration])} for iteration in shown]
    names = [f"iteration {iteration:,}" if iteration else "before RL" for iteration in shown]
    prompts = [AnsweredPrompt(row["messages"], tuple(map(_answer, names, (rows.get(prompt) for rows in answers))))
               for prompt, row in list(answers[0].items())[:_PROMPTS]]
    body = render("compared_answers.html.j2", groups=[("The first held-out helpful prompts", prompts)], names=names,
                  tones=range(1, most + 1))
    later = number > 1
    return ReportSection("samples" + f"-{number}" * later, "Answers during RL" + f" of round {number}" * later, body=body,
                         nav="During RL" + f", round {number}" * later)


def _answer(name: str, row) -> ModelAnswer | None:
    if row is None:
        return None
    tags = [] if row.get("score") is None else [Tag(f"score {decimal(row['score'], 2)}", "plain")]
    tags += [] if row.get("complete", True) else [Tag("cut off", "plain")]
    return ModelAnswer(name, row["response"], tuple(tags))
