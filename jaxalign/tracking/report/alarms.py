"""The alarms of RL in the report (`config.ppo.alarms`): sentences about those that fired, plots of the measures, and the
answers to held-out prompts that were measured."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from jaxalign.config import AlarmsConfig, rounds
from jaxalign.tracking.alarms import Fired, outcome, read_measurements
from jaxalign.tracking.formatting import decimal
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.report.blocks import Figure, ReportSection, curve_figure
from jaxalign.tracking.report.examples import AnsweredPrompt, ModelAnswer, Tag
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_PLOTS = (
    ("Held-out helpful prompts: mean score", {"score": "score"}),
    ("Held-out helpful prompts: length", {"length": "tokens"}),
    ("Held-out helpful prompts: shares", {"refused": "refused", "unfinished": "did not end", "repetition": "repeated 4-grams",
                                          "win_rate": "win rate"}),
)
_FILE = re.compile(r"alarm-answers-(\d+)\.jsonl")
_COLUMNS, _PROMPTS = 4, 4
_LONG = 20  # Iterations of RL from which `alarms.every=10` records more than the first and the last answers.


def fired_alarms(run: RunFiles) -> tuple[Fired, ...]:
    """The alarms that fired in stage ppo."""
    measured = read_measurements(run.stage("ppo").metrics)
    fields = {field.name for field in dataclasses.fields(AlarmsConfig)}
    settings = (run.config.get("ppo") or {}).get("alarms") or {}
    section = AlarmsConfig(**{name: value for name, value in settings.items() if name in fields})
    return outcome(section, measured).fired if measured else ()


def alarm_sentences(run: RunFiles) -> list[str]:
    """A sentence for each alarm that fired in stage ppo, and one about the policy that is kept; empty without alarms."""
    measured, fired = read_measurements(run.stage("ppo").metrics), fired_alarms(run)
    if not measured:
        return []
    if not fired:
        return [f"No alarm fired in {len(measured) - 1:,} measurements on held-out helpful prompts."]
    sentences = [alarm.sentence() for alarm in fired]
    action = ((run.config.get("ppo") or {}).get("alarms") or {}).get("action", AlarmsConfig().action)
    kept = (run.stage("ppo").summary.get("alarms") or {}).get("kept")
    if action == "stop":
        sentences.append("The run ended with an error.")
    elif action == "best" and kept is not None:
        sentences.append(f"RL ended, and the policy after iteration {kept:,} is kept.")
    return sentences


def alarm_figures(run: RunFiles) -> tuple[Figure, ...]:
    """Plots of the measures by iteration; iteration 0 is the policy before RL."""
    measured = read_measurements(run.stage("ppo").metrics)
    figures = []
    for title, names in _PLOTS:
        curves = {label: [(one.iteration, one.values.get(name, math.nan)) for one in measured] for name, label in names.items()}
        figures += curve_figure(title, curves, "iteration")
    return tuple(figures)


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
