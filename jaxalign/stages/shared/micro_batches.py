"""Chooses the size of a stage's micro-batches for the devices of this run: `micro_batch_tokens=auto`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxalign.config import Config, schema
from jaxalign.parallel import hosts
from jaxalign.parallel.device_memory import usable_memory
from jaxalign.planner.compiled import attached_peak
from jaxalign.planner.hardware import Cluster, chip_of
from jaxalign.planner.micro_batches import MicroBatches, choices, is_auto, section_of, with_defaults, with_tokens
from jaxalign.planner.placement_auto import attached_cluster
from jaxalign.planner.programs import Run, run_tasks
from jaxalign.planner.report import GB
from jaxalign.planner.role_models import part_of
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.manifest import MICRO_BATCHES
from jaxalign.tracking.workdir import read_object


def with_micro_batches(context: StageContext, stage: str) -> StageContext:
    """The context with numbers instead of "auto": for the stage a chosen size, which is printed, and elsewhere the default.

    The estimate proposes the sizes, and the compiler for the attached devices confirms that the stage's programs fit. A resumed
    run keeps the size on the same devices. If a size cannot be chosen, the default is used.
    """
    config = with_defaults(context.config)
    if not is_auto(context.config, stage):
        return context if config == context.config else dataclasses.replace(context, config=config)
    path, where = context.directory / MICRO_BATCHES, _where(config)
    kept = hosts.once(lambda: read_object(path))
    if kept.get("where") == where and isinstance(kept.get("tokens"), int):
        section, tokens = section_of(stage), kept["tokens"]
        sentence = f"config.{section}.micro_batch_tokens=auto: {tokens} tokens per device, as in the interrupted run"
    else:
        choice, sentence = _choose(config, stage)
        if choice is None:
            _print(context, f"config.{section_of(stage)}.micro_batch_tokens=auto: the default size, because {sentence}")
            return dataclasses.replace(context, config=config)
        section, tokens = choice.section, choice.tokens
        write_json(path, {"tokens": tokens, "reason": sentence, "where": where})
    _print(context, sentence)
    return dataclasses.replace(context, config=with_tokens(config, section, tokens))


def _print(context: StageContext, sentence: str) -> None:
    if hosts.is_first():
        print(f"[{context.title}] {sentence}", flush=True)


def _where(config: Config) -> dict[str, Any]:
    """The devices for which a choice holds, as JSON values. A resumed run may have others."""
    return {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "mesh": schema.to_plain(config.mesh)}


def _choose(config: Config, stage: str) -> tuple[MicroBatches | None, str]:
    """(the choice, a sentence about it) or (None, the reason why none is made). config: without "auto"."""
    cluster, sentence = _cluster(config)
    if cluster is None:
        return None, sentence
    assumed = f" ({sentence})" if sentence else ""
    found = _agreed(lambda: _proposed(config, stage, cluster))
    if isinstance(found, str):
        return None, found
    for choice in (MicroBatches(**values) for values in found):
        peak = _agreed(functools.partial(_compiled_peak, with_tokens(config, choice.section, choice.tokens), stage))
        if isinstance(peak, str):
            return None, peak
        if peak is not None and peak <= choice.usable:
            return choice, f"{choice.sentence}, the compiler's {peak / GB:.3g} GB{assumed}"
    return None, f"by the compiler none of the sizes fits into {cluster.usable / GB:.3g} GB{assumed}"


def _agreed(action: Callable[[], Any]) -> Any:
    """The result of the action in the first process, so that all processes run the same programs, or a sentence on its error: a
    run does not depend on the choice. All processes perform it, since some compilers share work among processes."""
    try:
        result = action()
    except Exception as error:
        result = f"the plan failed ({type(error).__name__}: {error})"
        if not hosts.is_first():
            logging.getLogger("jaxalign").warning(f"process {hosts.index()}: {result}")
    return hosts.once(lambda: result)


def _proposed(config: Config, stage: str, cluster: Cluster) -> list[dict[str, Any]]:
    """`choices` as JSON values."""
    given = Given(config, policy_model(config, run_models.sharding(config.mesh)), cluster)
    found = choices(config, stage, given.policy, lambda changed, only: given.estimated(changed, {only}))
    return [dataclasses.asdict(choice) for choice in found]


def _cluster(config: Config) -> tuple[Cluster | None, str]:
    """(the attached devices, a sentence on an assumption or "") or (None, the reason why no size is chosen for them)."""
    devices, slices = jax.devices(), config.mesh.slices
    if devices[0].platform == "cpu":
        return None, "a CPU is not faster with a larger one"
    cluster, sentence = attached_cluster(devices)
    if cluster is None:
        return None, sentence
    memory = usable_memory(np.asarray(devices))
    if memory is None and chip_of(devices[0].device_kind) is None:
        return None, f"the memory of {devices[0].device_kind} is unknown"
    usable = float(memory or cluster.usable)
    parted = part_of(cluster.chip, len(devices) // slices)
    return dataclasses.replace(parted, slices=slices, usable=usable), sentence


def _compiled_peak(config: Config, stage: str) -> int | None:
    """Bytes in use at the peak of the stage's programs whose size depends on the micro-batches, compiled for the devices of
    config.mesh; None if the compiler rejects one."""
    run = Run(config, policy_model(config, run_models.sharding(config.mesh)))
    peaks = [attached_peak(program) for task in run_tasks(run, {stage})
             if task.phase in ("score", "checks", "update") and task.calls != 0 for program in task.programs()]
    return None if None in peaks else max(peaks)
