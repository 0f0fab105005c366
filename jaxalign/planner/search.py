"""Finds the fastest mesh that fits a run on a cluster, and changes that make a run fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator

from jaxalign.config import Config, check
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.model import Model
from jaxalign.planner.estimate import Assumptions, RunEstimate, abstract_sharding, estimate
from jaxalign.planner.hardware import Cluster
from jaxalign.planner.micro_batches import MARGIN, AutoChoices, resolved
from jaxalign.planner.programs import Run, Task, estimated_tasks
from jaxalign.registry.stages import stages_in_order

_LENGTHS = ("row_length", "max_length", "max_new_tokens")
"""Fields that bound the length of a stage's rows; of each section, the first one that it has applies."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The inputs of a plan. others: devices of further kinds, numbered after those of `cluster`, for `config.placement`."""

    config: Config
    policy: Model
    cluster: Cluster
    assumptions: Assumptions = Assumptions()
    prompt: int | None = None
    examples: int | None = None
    others: tuple[Cluster, ...] = ()

    def estimate(self) -> RunEstimate:
        """The plan with all roles on config.mesh. Its config has the choices for that mesh instead of "auto".

        Raises UserError if config.mesh is not possible.
        """
        return self.resolved()[0].estimated()

    def resolved(self) -> tuple[Given, AutoChoices]:
        """(these inputs with the choices instead of "auto", the choices)."""
        check(self.config)
        config, chosen = resolved(self.config, self.policy, lambda changed, stage: self.estimated(changed, {stage}))
        return (dataclasses.replace(self, config=config) if chosen != AutoChoices() else self), chosen

    def estimated(self, config: Config | None = None, only: Collection[str] | None = None) -> RunEstimate:
        """The estimate of a config without "auto", by default its own. only: the stages; None: all."""
        config = self.config if config is None else config
        return estimate(config, self.policy, self.cluster, self.assumptions, self.prompt, self.examples, only)


def meshes(devices: int, pipeline: int, slices: int) -> Iterator[dict[str, int]]:
    """Sizes of data, fsdp, context and tensor for every mesh that uses all devices. data is a multiple of `slices`."""
    inner = devices // pipeline
    divisors = [n for n in range(1, inner + 1) if inner % n == 0]
    for tensor, context, fsdp in itertools.product(divisors, repeat=3):
        data, rest = divmod(inner, tensor * context * fsdp)
        if rest == 0 and data % slices == 0:
            yield {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}


@functools.lru_cache(maxsize=32)
def possible(given: Given) -> tuple[RunEstimate, ...]:
    """Estimates for every mesh of the whole cluster that divides the model and the batches, with mesh.generation "tensor" and
    "training". Estimates that fit with `MARGIN` come first, then those that fit without it, both sorted by time; the others
    follow, sorted by peak memory. pipeline, slices and zero keep their values."""
    mesh, estimates = given.config.mesh, []
    if given.cluster.devices % mesh.pipeline:
        return ()
    for sizes in meshes(given.cluster.devices, mesh.pipeline, mesh.slices):
        for generation in ("tensor", "training"):
            if generation == "training" and sizes["fsdp"] == 1:
                continue
            kept = mesh.keep_gathered if sizes["fsdp"] > 1 else "never"
            changed = dataclasses.replace(mesh, **sizes, generation=generation, keep_gathered=kept)
            try:
                estimates.append(_with(given, mesh=changed).estimate())
            except UserError:
                continue

    def rank(run: RunEstimate) -> tuple[bool, bool, float, int]:
        # Ties go to the mesh that splits fewer axes.
        axes_split = sum(getattr(run.config.mesh, axis) > 1 for axis in ("data", "fsdp", "context", "tensor"))
        return not run.fits, _tight(run), _seconds(run) if run.fits else run.peak, axes_split

    return tuple(sorted(estimates, key=rank))


def _tight(run: RunEstimate) -> bool:
    return run.peak > (1 - MARGIN) * run.cluster.usable


def _seconds(run: RunEstimate) -> float:
    """The time of a run. A task with an unknown number of calls counts as one call."""
    return run.seconds + sum(task.seconds for task in run.tasks if task.task.calls is None)


def less_recomputation(given: Given, run: RunEstimate) -> tuple[str, RunEstimate] | None:
    """The fastest way to recompute less in the backward pass, with its plan; None if none fits with `MARGIN` and saves 5% of
    the time. run: the plan of the inputs, whose roles share one mesh."""
    if not run.fits or not given.policy.config.remat:
        return None
    # Without remat, a config must not set remat_saves.
    whole = {"remat": False} | ({"remat_saves": "nothing"} if given.config.model.remat_saves != "nothing" else {})
    tried = [_try([_with_model(given, **fields)]) for fields in ({"remat_saves": "products"}, whole)]
    faster = [each for each in tried if each is not None and each[1].fits and not _tight(each[1])
              and _seconds(each[1]) <= 0.95 * _seconds(run)]
    return min(faster, key=lambda each: (_seconds(each[1]), each[1].peak), default=None)


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """A change: its description, and the changed inputs of the plan."""

    words: str
    given: Given


def advice(given: Given, keep: int = 4) -> list[tuple[str, RunEstimate]]:
    """The first changes that make a run fit, each with its plan. Changes that affect the run least come first.

    Tries each change on its own. If none suffices, combines changes until the run fits.
    """
    fitting = []
    for change in _CHANGES:
        run = _try(change(given))
        if run is not None and run[1].fits:
            fitting.append(run)
            if len(fitting) == keep:
                break
    if fitting:
        return fitting
    combined, words = given, []
    for change in _CHANGES:
        before = words
        for variant in change(combined):  # Variants of one change: each replaces the previous one.
            try:
                run = variant.given.estimate()
            except UserError:
                continue
            combined, words = variant.given, [*before, variant.words]
            if run.fits:
                return [(", and ".join(words), run)]
    return []


def _try(changes: list[PlanChange]) -> tuple[str, RunEstimate] | None:
    """The first variant of a change that fits, else the last valid one; None if no variant is valid."""
    tried = None
    for change in changes:
        try:
            tried = (change.words, change.given.estimate())
        except UserError:
            continue
        if tried[1].fits:
            break
    return tried


def _with(given: Given, **sections) -> Given:
    return dataclasses.replace(given, config=dataclasses.replace(given.config, **sections))


def _other_mesh(given: Given) -> list[PlanChange]:
    best = possible(given)[:1]
    return [
        PlanChange(f"config.mesh: {mesh_words(run.config.mesh)}", dataclasses.replace(given, config=run.config))
        for run in best if run.config.mesh != given.config.mesh
    ]


def _gathered_again(given: Given) -> list[PlanChange]:
    if given.config.mesh.keep_gathered == "never":
        return []
    mesh = dataclasses.replace(given.config.mesh, keep_gathered="never")
    return [PlanChange("config.mesh.keep_gathered=never", _with(given, mesh=mesh))]


def _remat(given: Given) -> list[PlanChange]:
    if given.policy.config.remat:
        return []
    return [_with_model(given, remat=True)]


def _with_model(given: Given, **fields: bool | str) -> PlanChange:
    """Changes fields of `config.model` and the fields of the same name in the policy's architecture."""
    changed = _with(given, model=dataclasses.replace(given.config.model, **fields))
    policy = dataclasses.replace(given.policy, config=dataclasses.replace(given.policy.config, **fields))
    words = ", ".join(f"config.model.{name}={value}" for name, value in fields.items())
    return PlanChange(words, dataclasses.replace(changed, policy=policy))


def _parts(given: Given) -> list[PlanChange]:
    """2, 4, 8 or 16 times as many micro-batches in every stage that uses them; packed ones get as small as possible."""
    changes, mesh = [], given.config.mesh
    ways, turns = mesh.data * mesh.fsdp, mesh.pipeline_micro_batches or mesh.pipeline
    for times in (2, 4, 8, 16):
        sections, words = {}, []
        for task in _tasks(given):
            stage, section = task.stage, getattr(given.config, task.stage, None)
            if task.phase != "update":
                continue
            if hasattr(section, "micro_batch_tokens"):
                rows, length = task.rows.rows // task.micro, task.rows.length
                least = length * math.lcm(ways * turns, task.unit) // ways
                name, value = "micro_batch_tokens", max(least, rows * length // ways // times)
            elif hasattr(section, "micro_batches"):
                name, value = "micro_batches", (section.micro_batches or 1) * times
            else:
                continue
            sections[stage] = dataclasses.replace(section, **{name: value})
            words.append(f"config.{stage}.{name}={value}")
        changes.append(PlanChange(", ".join(words), _with(given, **sections)))
    return changes


def _tasks(given: Given) -> list[Task]:
    """The tasks that the estimate counts, even if the plan is not possible."""
    policy = dataclasses.replace(given.policy, sharding=abstract_sharding(given.config.mesh))
    return estimated_tasks(Run(given.config, policy, given.prompt, given.examples))


def _larger(given: Given) -> list[PlanChange]:
    """2, 4 or 8 times as many of the same chips, with the best mesh for them."""
    changes, shape, chip = [], list(given.cluster.shape), given.cluster.chip
    for _ in range(3):
        shape[shape.index(min(shape))] *= 2
        devices = math.prod(shape)
        if devices > chip.largest or (chip.host_network is None and devices > chip.chips_per_host):
            break
        larger = dataclasses.replace(given, cluster=dataclasses.replace(given.cluster, shape=tuple(sorted(shape))))
        best = possible(larger)[:1]
        changes += [
            PlanChange(f"a larger cluster, {larger.cluster.name}, with config.mesh: {mesh_words(run.config.mesh)}",
                       dataclasses.replace(larger, config=run.config)) for run in best
        ]
    return changes


def _adapters(base: str, words: str, given: Given) -> list[PlanChange]:
    """Adapters on a base that is stored as `base`, unless the base is stored in as few bytes already."""
    adapted = base == "nf4" or given.policy.lora is not None
    as_small = ("nf4",) if base == "nf4" else ("bfloat16", "int8", "nf4")
    if adapted and given.config.lora.base in as_small:
        return []
    section = dataclasses.replace(given.config.lora, rank=given.config.lora.rank or 16, base=base)
    lora = given.policy.lora or LoraAdapters(
        section.rank, section.alpha, section.targets, section.rank_stabilised, section.dora
    )
    changed = dataclasses.replace(_with(given, lora=section), policy=dataclasses.replace(given.policy, lora=lora))
    return [PlanChange(f"{words}: config.lora.rank={section.rank}, config.lora.base={base}", changed)]


def _smaller_batch(given: Given) -> list[PlanChange]:
    """Half, then a quarter of the batch, in the stages that alternate between sampling and training."""
    changes = []
    for times in (2, 4):
        sections, words = {}, []
        for record in stages_in_order(given.config.stages):
            stage, section = record.name, getattr(given.config, record.name, None)
            alternates = record.samples and record.trains and hasattr(section, "iterations")
            if alternates and section.batch % times == 0:
                sections[stage] = dataclasses.replace(section, batch=section.batch // times)
                words.append(f"config.{stage}.batch={section.batch // times}")
        if sections:
            changes.append(PlanChange(", ".join(words), _with(given, **sections)))
    return changes


def _shorter(given: Given) -> list[PlanChange]:
    """Rows half as long, wherever the config bounds their length."""
    config, sections, words = given.config, {}, []
    for owner in ("model", *dict.fromkeys(task.stage for task in _tasks(given))):
        section = getattr(config, owner, None)
        name = next((name for name in _LENGTHS if hasattr(section, name)), None)
        if name is not None:
            half = max(1, getattr(section, name) // 2)
            sections[owner] = dataclasses.replace(section, **{name: half})
            words.append(f"config.{owner}.{name}={half}")
    changed = _with(given, **sections)
    if given.prompt is not None:
        changed = dataclasses.replace(changed, prompt=max(1, given.prompt // 2))
    return [PlanChange("shorter rows: " + ", ".join(words), changed)]


_CHANGES: tuple[Callable[[Given], list[PlanChange]], ...] = (
    _gathered_again, _other_mesh, _remat, _parts, _larger, functools.partial(_adapters, "bfloat16", "adapters"),
    functools.partial(_adapters, "nf4", "adapters on a 4-bit base"), _smaller_batch, _shorter,
)
"""The changes that `advice` tries, in order."""


def mesh_words(mesh) -> str:
    """A mesh in one line: "fsdp=8, tensor=4"."""
    sizes = [f"{axis}={getattr(mesh, axis)}" for axis in ("pipeline", "data", "fsdp", "context", "tensor", "slices")
             if getattr(mesh, axis) > 1]
    others = [f"zero={mesh.zero}"] if mesh.zero != 3 else []
    others += [f"keep_gathered={mesh.keep_gathered}"] if mesh.keep_gathered != "never" else []
    others += ["sequence_parallel"] if mesh.sequence_parallel else []
    others += [f"generation={mesh.generation}"] if mesh.generation != "tensor" else []
    return ", ".join(sizes + others) or "one device"
