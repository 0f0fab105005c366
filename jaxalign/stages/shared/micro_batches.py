"""Chooses the size of a stage's micro-batches, and whether they share gathered weights, for the devices of this run:
`micro_batch_tokens=auto` and `mesh.keep_gathered=auto`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxalign.config import Config, schema
from jaxalign.config.sections.shared import AUTO
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.parallel.device_memory import usable_memory
from jaxalign.planner.compiled import attached_peak
from jaxalign.planner.hardware import Cluster, chip_of
from jaxalign.planner.micro_batches import KeptWeights, choices, is_auto, section_of, with_defaults, with_kept, with_tokens
from jaxalign.planner.placement_auto import attached_cluster
from jaxalign.planner.programs import Run, run_tasks
from jaxalign.planner.report import GB
from jaxalign.planner.role_models import part_of
from jaxalign.planner.search import Given
from jaxalign.planner.shapes import policy_model
from jaxalign.registry.stages import stages_in_order
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.tracking.workdir import MICRO_BATCHES, read_object

_TOKENS, _KEPT = "tokens", "keep_gathered"


class _Variant(NamedTuple):
    """A config to try: tokens for the stage's section, or None; the value of `mesh.keep_gathered`; the printed sentences; the
    bytes of a device that programs can use. All values are JSON values."""

    tokens: int | None
    kept: str
    sentences: list[str]
    usable: float

    def config(self, config: Config, stage: str) -> Config:
        """The config with these values. config: without "auto"."""
        config = with_kept(config, self.kept)
        return config if self.tokens is None else with_tokens(config, section_of(stage), self.tokens)


def with_micro_batches(context: StageContext, stage: str) -> StageContext:
    """The context with every "auto" replaced: by choices, which are printed, for this stage, and by the defaults elsewhere.

    The estimate proposes the values, and the compiler for the attached devices confirms that the stage's programs fit. A
    resumed run keeps them on the same devices. If nothing can be chosen, the defaults are used.
    """
    config, names = with_defaults(context.config), _fields(context.config, stage)
    path, mesh = context.directory / MICRO_BATCHES, schema.to_plain(context.config.mesh)
    # The devices for which a choice holds. A resumed run may have others.
    where = {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "mesh": mesh}
    if not names:
        _forget(path)
        return context if config == context.config else dataclasses.replace(context, config=config)
    stored = hosts.once(lambda: read_object(path))
    tokens, kept = stored.get(_TOKENS), stored.get(_KEPT)
    valid = (type(tokens) is int if _TOKENS in names else tokens is None) and kept in ("never", "always")
    if stored.get("where") == where and valid:
        variant = _Variant(tokens, kept, [], 0.0)
        values = {_TOKENS: f"{variant.tokens} tokens per device", _KEPT: variant.kept}
        changed = stored.get("chosen") not in (None, [tokens, kept])
        origin = f"from {MICRO_BATCHES}" if changed else "as in the interrupted run"
        sentences = [f"{name}=auto: {values[field]}, {origin}" for field, name in names.items()]
        if changed:
            write_json(path, {**stored, "reason": ". ".join(sentences), "chosen": [tokens, kept]})
    else:
        variant, sentences = _choose(context.config, stage)
        if variant is None:
            _forget(path)
            values = {_TOKENS: "the default size", _KEPT: "never"}
            for field, name in names.items():
                _print(context, f"{name}=auto: {values[field]}, because {'; '.join(sentences)}")
            return dataclasses.replace(context, config=config)
        write_json(path, {_TOKENS: variant.tokens, _KEPT: variant.kept, "reason": ". ".join(sentences), "where": where,
                          "chosen": [variant.tokens, variant.kept]})
    for sentence in sentences:
        _print(context, sentence)
    return dataclasses.replace(context, config=variant.config(config, stage))


def _fields(config: Config, stage: str) -> dict[str, str]:
    """The stage's fields that are "auto": the full name of each, by its key in the stage's file."""
    tokens = {_TOKENS: f"config.{section_of(stage)}.micro_batch_tokens"} if is_auto(config, stage) else {}
    gathers = config.mesh.keep_gathered == AUTO and any(
        record.trains for record in stages_in_order(config.stages) if record.name == stage
    )
    return tokens | ({_KEPT: "config.mesh.keep_gathered"} if gathers else {})


def _forget(path: Path) -> None:
    """Removes the choice of an earlier start, which does not hold for this one."""
    if hosts.is_first():
        path.unlink(missing_ok=True)


def _print(context: StageContext, sentence: str) -> None:
    if hosts.is_first():
        print(f"[{context.title}] {sentence}", flush=True)


def _choose(config: Config, stage: str) -> tuple[_Variant | None, list[str]]:
    """(the choice, sentences about it) or (None, [the reason why none is made]). config: with "auto"."""
    cluster, sentence = _cluster(config)
    if cluster is None:
        return None, [sentence]
    assumed = [sentence] if sentence else []
    found = _agreed(lambda: [variant._asdict() for variant in _variants(config, stage, cluster)])
    if isinstance(found, str):
        return None, [found]
    for variant in (_Variant(**values) for values in found):
        if variant.tokens is None and variant.kept == "never":
            return variant, variant.sentences + assumed
        peak = _agreed(functools.partial(_compiled_peak, variant.config(with_defaults(config), stage), stage))
        if isinstance(peak, str):
            return None, [peak]
        if peak is not None and peak <= variant.usable:
            measured = f"compiled, the programs of this stage need {peak / GB:.3g} of {variant.usable / GB:.3g} GB"
            return variant, [*variant.sentences, measured, *assumed]
    return None, [f"according to the compiler, none of the choices fits in {cluster.usable / GB:.3g} GB", *assumed]


def _variants(config: Config, stage: str, cluster: Cluster) -> list[_Variant]:
    """The values to try, the best first. If the plan of the whole run keeps weights gathered, sizes that are then faster than
    the best size with weights that are gathered again come first. config: with "auto"."""
    given, plain = Given(config, policy_model(config, run_models.sharding(config.mesh)), cluster), with_defaults(config)
    kept = given.resolved()[1].kept if config.mesh.keep_gathered == AUTO else None
    values = [config.mesh.keep_gathered] if kept is None else ["always", "never"] if kept.keep else ["never"]
    if not is_auto(config, stage):
        return [_Variant(None, value, _words(kept, value, True), cluster.usable) for value in values]

    def estimate(changed: Config, only: str):
        return given.estimated(changed, {only})

    listed = {value: choices(with_kept(plain, value), stage, given.policy, estimate) for value in values}
    again = listed["never"][0].seconds if len(values) > 1 else math.inf
    faster = {value: [size for size in sizes if value == "never" or size.seconds < again] for value, sizes in listed.items()}
    return [
        _Variant(size.tokens, value, [size.sentence, *_words(kept, value, bool(faster.get("always")))], size.usable)
        for value, sizes in faster.items() for size in sizes
    ]


def _words(kept: KeptWeights | None, value: str, tried: bool) -> list[str]:
    """The sentence on a value of `mesh.keep_gathered`, if it was chosen. tried: whether "always" was tried before "never"."""
    if kept is None:
        return []
    if value == kept.value:
        return [kept.sentence]
    reason = "Compiled, no faster choice with always fits" if tried else "In this stage, no choice is faster with always"
    return [f"config.mesh.keep_gathered=auto: never. {reason}"]


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


def _cluster(config: Config) -> tuple[Cluster | None, str]:
    """(the attached devices, a sentence on an assumption or "") or (None, the reason why no size is chosen for them)."""
    devices, slices = jax.devices(), config.mesh.slices
    if devices[0].platform == "cpu":
        return None, "it makes no difference to the speed of a CPU"
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
    if not peaks:
        raise UserError(f"the plan contains no programs of stage {stage} that read micro-batches")
    return None if None in peaks else max(peaks)
