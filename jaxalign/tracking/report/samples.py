"""Answers to the same held-out prompts during RL, as the alarms of RL measured them (`config.ppo.alarms`)."""

from __future__ import annotations

import re

from jaxalign.tracking.formatting import decimal
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.report.blocks import ReportSection
from jaxalign.tracking.report.examples import AnsweredPrompt, ModelAnswer, Tag
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_FILE = re.compile(r"alarm-answers-(\d+)\.jsonl")
_COLUMNS, _PROMPTS = 4, 4


def rl_samples(run: RunFiles) -> list[ReportSection]:
    """The answers to the first prompts before RL, at its newest measurement, and at two between; no section without files."""
    paths = (run.path / "ppo").glob("alarm-answers-*.jsonl")
    files = {int(match[1]): path for path in paths if (match := _FILE.fullmatch(path.name))}
    iterations = sorted(files)
    if not iterations:
        return []
    most = min(_COLUMNS, len(iterations))
    shown = [iterations[round(index * (len(iterations) - 1) / max(1, most - 1))] for index in range(most)]
    answers = [{row["prompt_id"]: row for row in read_rows(files[iteration])} for iteration in shown]
    names = [f"iteration {iteration:,}" if iteration else "before RL" for iteration in shown]
    prompts = [AnsweredPrompt(row["messages"], tuple(map(_answer, names, (rows.get(prompt) for rows in answers))))
               for prompt, row in list(answers[0].items())[:_PROMPTS]]
    body = render("compared_answers.html.j2", groups=[("The first held-out helpful prompts", prompts)], names=names,
                  tones=range(1, most + 1))
    return [ReportSection("samples", "Answers during RL", body=body, nav="During RL")]


def _answer(name: str, row) -> ModelAnswer | None:
    if row is None:
        return None
    tags = [] if row.get("score") is None else [Tag(f"score {decimal(row['score'], 2)}", "plain")]
    tags += [] if row.get("complete", True) else [Tag("cut off", "plain")]
    return ModelAnswer(name, row["response"], tuple(tags))
