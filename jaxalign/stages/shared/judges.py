"""The judges of `config.feedback` and `config.judge`, and the labeller and rater that query them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxalign.config import Config
from jaxalign.data.chat.requests import load_set, set_files
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.constitution import builtin_names, load_constitution, load_exemplars
from jaxalign.feedback.judge import JudgeInputs
from jaxalign.feedback.labeller import Labeller
from jaxalign.feedback.local import LocalJudge, make_local_judge
from jaxalign.feedback.rater import Rater
from jaxalign.feedback.speaker import Counted
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.records import Principle
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.judges import judge_field, judge_file, stage_judge
from jaxalign.registry.stages import stages_in_order
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext


def constitution(config: Config) -> tuple[Principle, ...]:
    """The principles of `config.feedback.constitution`."""
    return load_constitution(config.feedback.constitution)


def compares(config: Config) -> bool:
    """Whether evaluation compares answers with its judge.

    A judge other than the base model does if it can. The base model does if `config.judge.evaluate` names it, if a stage asks
    the judge, or if it learns to judge from the data.
    """
    record = stage_judge(config, "evaluate")
    if not record.runs_base:
        return record.methods is None or "compare" in record.methods
    asked = bool(config.judge.evaluate) or any(stage.asks_judge for stage in stages_in_order(config.stages))
    return asked or (data_source(config).feedback and config.model.source == "scratch")


def feedback_files(config: Config, stage: str) -> dict[Path, str]:
    """The user's files of the constitution, the templates and the judge of a stage, with the config fields that name them.

    Raises:
      UserError: the constitution or the templates cannot be read. This is detected before any stage starts.
    """
    name, templates, judge = config.feedback.constitution, config.feedback.templates, judge_file(config, stage)
    load_constitution(name)
    load_exemplars(name)
    found = {} if name in builtin_names() else {Path(name).expanduser(): "feedback.constitution"}
    if templates:
        load_set(templates)
        found |= dict.fromkeys(set_files(templates), "feedback.templates")
    return found if judge is None else found | {judge: judge_field(config, stage)}


def make_judge(
    context: StageContext, stage: str, model: Model, batch: int, counted: Counted | None = None,
    writing: Sampling | None = None, trains: bool = False,
) -> CheckedJudge:
    """The judge of a stage. Takes the name of the stage and the fields of `JudgeInputs`.

    A judge that does not compute on the devices of all processes is made on the first process only.
    """
    config, record = context.config, stage_judge(context.config, stage)
    inputs = JudgeInputs(config, context, model, batch, writing, counted, trains)
    if record.on_all_processes:
        return CheckedJudge(record.load()(inputs), record.name, config.judge, on_all_processes=True)
    made: list[Any] = []
    hosts.once(lambda: made.append(record.load()(inputs)))
    return CheckedJudge(made[0] if made else None, record.name, config.judge)


def make_local(inputs: JudgeInputs) -> LocalJudge:
    """The run's base model as the judge."""
    config, context = inputs.config, inputs.context
    tokenizer, params = run_models.load_tokenizer(context), run_models.base_params(context, inputs.model)
    role = run_models.frozen_role(context, inputs.model, params) if inputs.trains else None
    return make_local_judge(
        inputs.model, None if inputs.trains else params, tokenizer, config.feedback, config.model.max_length, inputs.batch,
        load_exemplars(config.feedback.constitution), inputs.writing, inputs.counted, role,
    )


def make_labeller(context: StageContext, judge: CheckedJudge) -> Labeller:
    """The labeller of pairs that `config.feedback` describes."""
    config = context.config
    return Labeller(judge, constitution(config), config.feedback, config.seed)


def make_rater(context: StageContext, judge: CheckedJudge, principles: int) -> Rater:
    """The rater of single responses under the run's constitution."""
    return Rater(judge, constitution(context.config), principles, context.config.seed)
