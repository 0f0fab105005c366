"""Chooses the size of a stage's micro-batches for the devices of this run: `micro_batch_tokens=auto`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.device_memory import usable_memory
from jaxalign.planner.compiled import CompiledProgram, Target, compile_targets
from jaxalign.planner.hardware import Cluster
from jaxalign.planner.micro_batches import MicroBatches, choices, is_auto, section_of, with_defaults, with_tokens
from jaxalign.planner.placement_auto import attached_cluster
from jaxalign.planner.programs import Run, run_tasks
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.tracking.workdir import read_object

CHOICE = "micro_batches.json"
"""The file of a stage's folder with the chosen size, which a resumed run keeps on devices of the same kind and mesh."""
_GB = 1e9


def with_micro_batches(context: StageContext, stage: str) -> StageContext:
    """The context with a number instead of "auto", which is chosen and printed.

    The estimate proposes the sizes, and the compiler for the attached devices confirms that the stage's programs fit.
    """
    if not is_auto(context.config, stage):
        return context
    owner, path, where = section_of(stage), context.directory / CHOICE, _where(context.config)
    kept = read_object(path)
    tokens = kept.get("tokens")
    if kept.get("where") == where and isinstance(tokens, int):
        sentence = f"config.{owner}.micro_batch_tokens=auto: {tokens} tokens per device, as in the interrupted run"
    else:
        tokens, sentence = _choose(with_defaults(context.config), stage)
        write_json(path, {"tokens": tokens, "where": where, "reason": sentence})
    if hosts.is_first():
        print(f"[{context.title}] {sentence}", flush=True)
    return dataclasses.replace(context, config=with_tokens(context.config, owner, tokens))


def _where(config: Config) -> dict[str, Any]:
    """The devices for which a choice holds, as JSON values."""
    mesh = {name: value for name, value in dataclasses.asdict(config.mesh).items() if isinstance(value, int | str | bool)}
    return {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "mesh": mesh}


def _choose(config: Config, stage: str) -> tuple[int, str]:
    """(micro_batch_tokens, a sentence). config: without "auto"."""
    name = f"config.{section_of(stage)}.micro_batch_tokens"
    cluster, sentence = _cluster()
    if cluster is None:
        return 0, f"{name}=auto: the default, because {sentence}"
    policy = policy_model(config, run_models.sharding(config.mesh))
    listed = hosts.once(functools.partial(_proposed, config, stage, policy, cluster))
    if isinstance(listed, str):
        return 0, f"{name}=auto: the default, because {listed}"
    proposed = [MicroBatches(**values) for values in listed]
    for choice in proposed:
        compiled = _compiled(with_tokens(config, choice.section, choice.tokens), stage, policy, int(choice.usable))
        if all(program.fits for program in compiled):
            peak = max(program.total for program in compiled) / _GB
            return choice.tokens, f"{choice.sentence}, the compiler's {peak:.1f} GB"
    last = proposed[-1]
    return last.tokens, f"{last.sentence}; the compiler needs more memory than that for each size, and this is the smallest"


def _cluster() -> tuple[Cluster | None, str]:
    """(the attached devices, "") or (None, the reason why no size is chosen for them)."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return None, "a CPU is not faster with a larger size"
    cluster, sentence = attached_cluster(devices)
    if cluster is None:
        return None, sentence
    return dataclasses.replace(cluster, usable=float(usable_memory(np.asarray(devices)) or cluster.usable)), ""


def _proposed(config: Config, stage: str, policy: Model, cluster: Cluster) -> list[Mapping[str, Any]] | str:
    """`choices` as JSON values, or the reason why there are none."""
    def estimate(changed: Config):
        return Given(changed, policy, cluster).estimate()

    try:
        return [dataclasses.asdict(choice) for choice in choices(config, stage, policy, estimate)]
    except UserError as error:
        return str(error)


def _compiled(config: Config, stage: str, policy: Model, usable: int) -> Sequence[CompiledProgram]:
    """The programs of a stage whose size depends on the micro-batches, compiled for the devices of the policy's mesh."""
    tasks = [task for task in run_tasks(Run(config, policy), {stage}) if task.phase != "generate" and task.calls != 0]
    return compile_targets([Target(program, usable) for task in tasks for program in task.programs()])
