"""The judges of `config.feedback` and `config.judge`, the models of local ones, and the labeller that queries them.

The model of a local judge is the run's base, the model of an earlier stage, or that of another folder (`config.judge.path`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.config.finished import is_model, is_stage, tokenizer_path, with_model_folder
from jaxalign.config.sections.feedback import ppo_methods
from jaxalign.data.chat.requests import load_set, set_files
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.constitution import builtin_names, load_constitution, load_exemplars
from jaxalign.feedback.contract import read_contract
from jaxalign.feedback.judge import JudgeInputs
from jaxalign.feedback.jury import Jury
from jaxalign.feedback.labeller import Labeller
from jaxalign.feedback.local import LocalJudge, make_local_judge, make_writer
from jaxalign.feedback.text_generator import Counted
from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints.huggingface import CheckpointConfig
from jaxalign.models.checkpoints.model_folder import read_folder
from jaxalign.models.configured import base_config
from jaxalign.models.language_model import load_model
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.judges import JUDGES, METHODS, judge_field, judge_file, judge_name, stage_judge
from jaxalign.registry.stages import STAGES, stages_in_order
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import endpoints, reads, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.engines import Meter
from jaxalign.steps.offload import FrozenRole


class JudgeModel(NamedTuple):
    """A judge's model. max_length: the maximum length of a request with the judge's text, in tokens."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    max_length: int


def check_folder(config: Config, folder: str, field: str = "judge.path") -> CheckpointConfig:
    """Reads config.json of a judge's folder, or that of the base of a stage's folder. field: the config field that names it.

    Raises:
      UserError: the folder does not exist, is not that of a language model, or has fewer positions than `judge.max_length`.
    """
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        raise UserError(f"config.{field} is {folder}, which is not a folder; give the folder of a language model, or of a "
                        "stage of a run")
    settings = base_config(with_model_folder(config, folder), path)
    if settings.head != "lm":
        raise UserError(f"config.{field} is {folder}, a {settings.family.classifier}, which scores texts; a language model is "
                        "expected")
    if settings.max_positions is not None and config.judge.max_length > settings.max_positions:
        raise UserError(f"config.judge.max_length is {config.judge.max_length}, but the judge in {folder} has "
                        f"{settings.max_positions} positions; lower it")
    return settings


def folder_requests(config: Config, folder: str) -> tuple[Tokenizer, int]:
    """(the tokenizer of a judge's folder, the maximum length of a request with the judge's text in tokens).

    Raises:
      UserError: as for `check_folder`.
    """
    length = config.judge.request_length(check_folder(config, folder).max_positions)
    return load_tokenizer(tokenizer_path(with_model_folder(config, folder), Path())), length


def load_folder(config: Config, folder: str) -> JudgeModel:
    """Loads the model in a folder of `config.judge.path` onto the run's mesh, with `config.judge`'s storage and dtype."""
    length = config.judge.request_length(check_folder(config, folder).max_positions)
    settings, kind = config.judge, config.judge.weights
    dtype = "float32" if kind == "float32" else "bfloat16"
    mesh = dataclasses.replace(config.mesh, offload=())  # The stage offloads the judge itself.
    path = Path(folder).expanduser()
    if is_model(path) and not is_stage(path):
        model, params, tokenizer, *_ = read_folder(path, mesh, length, dtype, settings.compute_dtype, kind=kind)
        return JudgeModel(model, params, tokenizer, length)
    loaded = load_model(path, mesh, max_length=length, dtype=dtype, compute_dtype=settings.compute_dtype)
    if loaded.frozen is not None:
        return JudgeModel(loaded.model, join(quantise(loaded.frozen, kind), loaded.params), loaded.tokenizer, length)
    return JudgeModel(loaded.model, quantise(loaded.params, kind), loaded.tokenizer, length)


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


def asked_methods(config: Config, stage: str) -> tuple[str, ...]:
    """The methods of the judge that a stage calls."""
    if stage == "ppo":
        return ppo_methods(config)
    if stage == "evaluate":
        compared = ("compare",) if config.evaluate.win_rate_prompts and compares(config) else ()
        return compared + (("rate",) if config.evaluate.rubrics else ())
    records = {record.name: record for record in (*STAGES, *stages_in_order(config.stages))}
    return records[stage].asks_judge


def feedback_files(config: Config, stage: str) -> dict[Path, str]:
    """The user's files of the constitution, the templates and the judge of a stage, with the config fields that name them.

    Raises:
      UserError: the constitution, the templates or the judge's model cannot be read, or the judge cannot be asked in this form.
        This is detected before any stage starts.
    """
    name, templates, judge = config.feedback.constitution, config.feedback.templates, judge_file(config, stage)
    load_constitution(name)
    load_exemplars(name)
    paths = {} if name in builtin_names() else {Path(name).expanduser(): "feedback.constitution"}
    if templates:
        read_contract(load_set(templates).form, f"the template set {templates}")
        paths |= dict.fromkeys(set_files(templates), "feedback.templates")
    if judge_name(config, stage) == "model":
        for folder in config.judge.path:
            _check_requests(config, stage, *folder_requests(config, folder))
            files = reads.base_files(with_model_folder(config, folder))
            paths |= dict.fromkeys(files, "judge.path")
    elif judge_name(config, stage) == "endpoint":
        endpoints.templates(config)
    elif stage_judge(config, stage).runs_base and config.model.source == "huggingface":
        if config.judge.max_length:
            check_folder(config, config.model.path, "model.path")
        place = tokenizer_path(config, Path())
        if place.exists():  # Otherwise the files of the model are reported.
            _check_requests(config, stage, load_tokenizer(place), config.judge.local_length(config))
    return paths if judge is None else paths | {judge: judge_field(config, stage)}


REQUEST_KINDS = {"critique": "critique", "revise": "revision", "compare": "comparison", "rate": "rating"}
"""The kind of request of each method of a judge."""


def _check_requests(config: Config, stage: str, tokenizer: Tokenizer, max_length: int) -> None:
    """Checks that a local judge with this tokenizer and context can be asked what a stage asks, if it asks anything."""
    methods = asked_methods(config, stage)
    if not methods:
        return
    writer = make_writer(tokenizer, config.feedback, max_length)
    reasoning = config.feedback.reasons(config)
    new = config.revise.max_new_tokens if stage == "revise" else config.feedback.max_reasoning_tokens if reasoning else 1
    writer.check([REQUEST_KINDS[method] for method in methods], reasoning, new)


def judge_stages(config: Config, stage: str) -> tuple[str, ...]:
    """The stage whose model judges in a stage; empty if it is the base or another judge."""
    judging_stage = config.feedback.judging_stage(config, stage)
    return (judging_stage,) if judging_stage and stage_judge(config, stage).runs_base else ()


def make_judge(
    context: StageContext, stage: str, model: Model, batch: int, counted: Counted | None = None,
    writing: Sampling | None = None, trains: bool = False, base: Params | None = None,
) -> CheckedJudge:
    """The judge of a stage. Takes the name of the stage and the fields of `JudgeInputs`.

    A judge that does not compute on the devices of all processes is made on the first process only.
    """
    config, record = context.config, stage_judge(context.config, stage)
    inputs = JudgeInputs(config, context, model, batch, writing, counted, trains, base)
    if record.on_all_processes:
        return CheckedJudge(record.load()(inputs), record.name, config.judge, on_all_processes=True)
    judges: list[Any] = []
    hosts.once(lambda: judges.append(record.load()(inputs)))
    return CheckedJudge(judges[0] if judges else None, record.name, config.judge)


@JUDGES.declare("local", runs_base=True, methods=METHODS)
def make_local(inputs: JudgeInputs) -> LocalJudge:
    """The run's base model, or the policy of `config.feedback.judge_stage` if it is trained before, as the judge."""
    config, context = inputs.config, inputs.context
    stage = config.feedback.judging_stage(config, context.directory.name)
    if stage:
        params = run_models.stage_params(context, stage, inputs.model)
    else:
        params = run_models.base_params(context, inputs.model) if inputs.base is None else inputs.base
    role = run_models.frozen_role(context, inputs.model, params) if inputs.trains else None
    length = config.judge.local_length(config)
    judge_model = JudgeModel(inputs.model, params, run_models.load_tokenizer(context), length)
    return _local_judge(inputs, judge_model, inputs.counted, role)


@JUDGES.declare("model", methods=METHODS, on_devices=True)
def make_model_judge(inputs: JudgeInputs) -> LocalJudge | Jury:
    """The model of `config.judge.path` as the judge, or several as a jury."""
    config, members = inputs.config, []
    for folder in config.judge.path:
        judge_model = load_folder(config, folder)
        role = FrozenRole(judge_model.params, "frozen" in config.mesh.offload) if inputs.trains else None
        counted = inputs.counted.of(judge_model.model) if isinstance(inputs.counted, Meter) else inputs.counted
        members.append(_local_judge(inputs, judge_model, counted, role))
    return members[0] if len(members) == 1 else Jury(tuple(members))


def _local_judge(
    inputs: JudgeInputs, judge_model: JudgeModel, counted: Counted | None, role: FrozenRole | None
) -> LocalJudge:
    settings = inputs.config.feedback
    return make_local_judge(
        judge_model.model, None if role else judge_model.params, judge_model.tokenizer, settings, judge_model.max_length,
        inputs.batch, load_exemplars(settings.constitution), inputs.writing, counted, role,
    )


def make_labeller(context: StageContext, judge: CheckedJudge) -> Labeller:
    """The labeller of pairs that `config.feedback` describes."""
    config = context.config
    return Labeller(judge, load_constitution(config.feedback.constitution), config.feedback, context.stream_seed)
