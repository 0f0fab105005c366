"""Sets up the alarms of stage ppo: its files, its held-out prompts and its judge."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.labeller import Pair
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.records import Prompt
from jaxalign.rl.alarms import AlarmRun, Questions, Records, WinRate
from jaxalign.stages.shared import engines, judges
from jaxalign.stages.shared.base import StageContext
from jaxalign.steps.checkpoint import save_params
from jaxalign.storage import write_atomically
from jaxalign.tracking.alarms import outcome, read_measurements
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.evaluation import won


def make_alarms(context: StageContext, model: Model, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> AlarmRun:
    """The alarms of stage ppo. prompts: the held-out helpful prompts."""
    config, section = context.config, context.config.ppo.alarms
    ids = [styles.encode_prompt(tokenizer, prompt.messages, config.data.style) for prompt in prompts]
    drawn = dataclasses.replace(config.ppo, temperature=section.temperature)
    if not section.temperature:  # Greedy answers do not depend on a filter.
        drawn = dataclasses.replace(drawn, top_k=0, top_p=1.0)
    sampling = engines.sampling(drawn, tokenizer, config.data.style)
    questions = Questions(prompts, ids, sampling, context.key("ppo", "alarms"), config.data.style)
    compare = _win_rate(context, model) if section.judge else None
    return AlarmRun(section, questions, _records(context.directory), config.ppo.iterations, compare, context.title)


def best_folder(directory: Path, iteration: int) -> Path:
    """The folder with the parameters of the policy after `iteration` iterations, if it was the best one measured."""
    return directory / "best" / f"{iteration}"


def summary(context: StageContext, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of the stage's summary about its alarms: {"alarms": ...}. rows: the rows of the metric file."""
    section, measured = context.config.ppo.alarms, read_measurements(rows)
    result = outcome(section, measured)
    kept = kept_iteration(context, rows)
    if not result.fired:
        why = "no alarm fired"
    elif section.action == "best":
        why = (f"an alarm fired at iteration {result.fired[0].iteration}; of the measured policies before it that crossed no "
               f"limit, the one after iteration {kept} has the highest mean score")
    else:
        why = "an alarm fired, and config.ppo.alarms.action is 'warn'"
    measurements = [
        {"iteration": one.iteration} | {name: None if math.isnan(value) else value for name, value in one.values.items()}
        for one in measured
    ]
    return {"alarms": {
        "measurements": measurements,
        "fired": [dataclasses.asdict(one) | {"sentence": one.sentence()} for one in result.fired],
        "kept": kept, "reason": why,
    }}


def kept_iteration(context: StageContext, rows: Sequence[Mapping[str, Any]]) -> int:
    """The number of iterations of the policy that is the stage's result. rows: the rows of the metric file."""
    section = context.config.ppo.alarms
    if section.every and section.action == "best":
        result = outcome(section, read_measurements(rows))
        if result.fired:
            return result.best
    return len(rows)


def _records(directory: Path) -> Records:
    """The files of the alarms: the measured answers of each iteration, and the newest policies."""
    answers = "alarm-answers-{:05d}.jsonl"

    def save_answers(iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        hosts.once(lambda: write_atomically(directory / answers.format(iteration), text))

    def first_answers() -> list[str]:
        path = directory / answers.format(0)
        responses = [row.get("response") for row in read_rows(path)]
        if not responses or not all(isinstance(response, str) for response in responses):
            raise UserError(f"{path} is missing or damaged; restore the file, or move the folder {directory} aside to run the "
                            "stage again")
        return responses

    def save_policy(iteration: int, params: Params) -> None:
        folder = best_folder(directory, iteration)
        save_params(folder, params)
        hosts.once(lambda: _remove_old(folder.parent, iteration))

    return Records(lambda: read_metrics(directory / "metrics.jsonl"), save_answers, first_answers, save_policy)


def _remove_old(folder: Path, newest: int) -> None:
    """Removes all policies but the newest and the one before it."""
    older = sorted((path for path in folder.iterdir() if path.name.isdigit() and int(path.name) < newest),
                   key=lambda path: int(path.name))
    for path in older[:-1]:
        shutil.rmtree(path)


def _win_rate(context: StageContext, model: Model) -> WinRate:
    config = context.config
    judge = judges.make_judge(context, "ppo", model, config.ppo.batch, trains=True)
    labeller, key = judges.make_labeller(context, judge), context.key("ppo", "alarm labels")

    def win_rate(prompts: Sequence[Prompt], texts: Sequence[str], first: Sequence[str]) -> float:
        pairs = [Pair(*three) for three in zip(prompts, texts, first, strict=True)]
        return won(labeller.label(pairs, key, 0))["rate"]

    return win_rate
