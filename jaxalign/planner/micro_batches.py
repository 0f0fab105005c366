"""Chooses the size of micro-batches (`micro_batch_tokens=auto`), and whether they share gathered weights
(`mesh.keep_gathered=auto`), for the devices that a run has. Neither changes results other than in rounding.

A larger micro-batch gathers and reads the weights less often, and needs more memory. The choice is the fastest size that fits
by the estimate; of sizes that are as fast, the smallest. Weights stay gathered if that fits and makes the updates of the whole
run faster.

The times compare sizes; they are no forecast. They add computing, memory and network, as if none of them overlapped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxalign.config import Config
from jaxalign.config.schema import field_types
from jaxalign.config.sections.shared import AUTO
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.planner.estimate import RunEstimate, TaskEstimate
from jaxalign.planner.work import KERNEL_SECONDS
from jaxalign.registry.stages import stages_in_order

ALIKE = 1.01
"""Times within this factor count as equal: the estimate is less precise than that."""
MARGIN = 0.05
"""The share of the memory that a choice leaves free if it can: the estimate may be too low by as much."""
FILLED = 0.5
"""The assumed share of a step's rows that packed sequences fill: few are as long as a row. Only a run shows the true share."""
_OWNERS = {"online_dpo": "dpo"}
"""The section with the micro-batches of a stage, if it is not that of the stage's name."""
_FORWARD_KERNELS, _UPDATE_KERNELS = (31, 42), (105, 154)
"""GPU kernels of a layer without and with adapters: of a forward pass, and of both passes with the recomputed forward pass.
Counted in the compiler's programs of Llama-3.1-8B on h100:1x8 and, with adapters, of Llama-3.2-1B."""
_GB = 1e9

KEPT = ("update", "checks")
"""The phases whose programs keep weights gathered."""

Estimate = Callable[[Config, str], RunEstimate]
"""Returns the estimate of one stage of a run with a config without "auto". Raises UserError if the run is not possible."""


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A size of the micro-batches of one stage.

    Attributes:
      stage: the stage.
      section: the config section with `micro_batch_tokens`.
      tokens: the value of `micro_batch_tokens`.
      parts: the largest number of micro-batches of an optimizer step.
      seconds: seconds of the programs that read micro-batches, in one iteration or step, without any overlap.
      peak: estimated bytes on one device, at the peak of these programs.
      usable: bytes of a device that programs can use.
    """

    stage: str
    section: str
    tokens: int
    parts: int
    seconds: float
    peak: float
    usable: float

    @property
    def sentence(self) -> str:
        """The choice in words, for a printed line."""
        some = "one micro-batch" if self.parts == 1 else f"at most {self.parts} micro-batches"
        return (f"config.{self.section}.micro_batch_tokens=auto: {self.tokens} tokens per device, {some} in a step; the "
                f"estimate is {self.peak / _GB:.3g} of {self.usable / _GB:.3g} GB")


def section_of(stage: str) -> str:
    """The name of the section with the micro-batches of a stage."""
    return _OWNERS.get(stage, stage)


def is_auto(config: Config, stage: str) -> bool:
    """Whether the size of the micro-batches of a stage is to be chosen."""
    return getattr(getattr(config, section_of(stage), None), "micro_batch_tokens", None) == AUTO


@dataclasses.dataclass(frozen=True)
class KeptWeights:
    """Whether updates keep their weights gathered.

    Attributes:
      keep: whether they do.
      reason: the reason, for a printed line.
    """

    keep: bool
    reason: str

    @property
    def value(self) -> str:
        """The value of `mesh.keep_gathered`."""
        return "always" if self.keep else "never"

    @property
    def sentence(self) -> str:
        """The choice in words, for a printed line."""
        return f"config.mesh.keep_gathered=auto: {self.value}. {self.reason}"


def with_kept(config: Config, value: str) -> Config:
    """The config with a value of `mesh.keep_gathered`."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, keep_gathered=value))


def with_tokens(config: Config, section: str, tokens: int) -> Config:
    """The config with a size of the micro-batches."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), micro_batch_tokens=tokens)})


def with_defaults(config: Config) -> Config:
    """The config with the default instead of each "auto"."""
    if config.mesh.keep_gathered == AUTO:
        config = with_kept(config, "never")
    for name in field_types(type(config)):
        if getattr(getattr(config, name), "micro_batch_tokens", None) == AUTO:
            config = with_tokens(config, name, 0)
    return config


class AutoChoices(NamedTuple):
    """The choices of a config: one size for each section with "auto"; kept is None without `mesh.keep_gathered` "auto"."""

    sizes: tuple[MicroBatches, ...] = ()
    kept: KeptWeights | None = None

    @property
    def sentences(self) -> list[str]:
        """The choices in words, for printed lines."""
        return [each.sentence for each in (*self.sizes, *([] if self.kept is None else [self.kept]))]


def resolved(config: Config, policy: Model, estimate: Estimate) -> tuple[Config, AutoChoices]:
    """(the config with a value instead of each "auto", the choices)."""
    if config.mesh.keep_gathered != AUTO:
        config, sizes = _sized(config, policy, estimate)
        return config, AutoChoices(sizes)
    never, always = (_sized(with_kept(config, value), policy, estimate) for value in ("never", "always"))
    kept = _compared(never[0], always[0], policy, estimate)
    config, sizes = always if kept.keep else never
    return config, AutoChoices(sizes, kept)


def _compared(never: Config, always: Config, policy: Model, estimate: Estimate) -> KeptWeights:
    """The choice between two configs: "always" if it fits in every stage, and makes updates faster both if communication
    overlaps with computation and if it does not. A task with an unknown number of calls counts as one call."""
    overlapped, added = [0.0, 0.0], [0.0, 0.0]
    for record in stages_in_order(never.stages):
        for at, run in enumerate(estimate(config, record.name) for config in (never, always)):
            for each in run.tasks:
                if each.task.phase not in KEPT or each.task.calls == 0:
                    continue
                usable = (1 - MARGIN) * run.cluster.usable
                if at and each.peak > usable:
                    return KeptWeights(False, f"{each.task.name} would need {each.peak / _GB:.3g} GB, and "
                                              f"{usable / _GB:.3g} GB may be used")
                calls = 1 if each.task.calls is None else each.task.calls
                kernels = _kernel_seconds(run, policy, each)
                parts = each.task.micro if each.task.packed else 1
                overlapped[at] += calls * _filled(each, each.seconds + kernels, parts)
                added[at] += calls * _filled(each, _seconds(run, policy, each), parts)
    if not overlapped[0]:
        return KeptWeights(False, "The plan contains no updates of these stages")
    for (one, other), words in ((overlapped, "overlaps"), (added, "does not overlap")):
        if one < ALIKE * other:
            slower = "be less than 1% faster" if other < one else f"take {other / one:.2f} times as long"
            return KeptWeights(False, f"By the plan of the run, updates would {slower} with always, if communication {words} "
                                      "with computation")
    return KeptWeights(True, f"By the plan of the run, updates take {overlapped[1] / overlapped[0]:.2f} times as long as with "
                             "never")


def _filled(each: TaskEstimate, seconds: float, parts: int) -> float:
    """The seconds of a task of which some micro-batches have no rows: on average half of the last one in use is padding. Data
    sent before the first micro-batch is always sent. parts: the number of micro-batches."""
    return each.early + (seconds - each.early) * (FILLED + 1 / (2 * parts))


def _sized(config: Config, policy: Model, estimate: Estimate) -> tuple[Config, tuple[MicroBatches, ...]]:
    """(the config with a size instead of each "auto", the choices).

    Of two stages with one section, the choice is that of the smaller size, which fits both.
    """
    found: dict[str, MicroBatches] = {}
    numbered = with_defaults(config)
    for record in stages_in_order(config.stages):
        if is_auto(config, record.name):
            best = choices(numbered, record.name, policy, estimate)[0]
            other = found.get(best.section)
            found[best.section] = best if other is None else min(best, other, key=lambda one: one.tokens)
    for name, choice in found.items():
        numbered = with_tokens(numbered, name, choice.tokens)
    return numbered, tuple(found.values())


def choices(config: Config, stage: str, policy: Model, estimate: Estimate) -> list[MicroBatches]:
    """The sizes for a stage, from the best to the smallest. Sizes that are not faster than a smaller one are left out.

    The best one leaves `MARGIN` free; if none does, it is the best that fits; if none fits, the smallest.

    Args:
      config: the run's config, without "auto".
      stage: the stage.
      policy: the run's model.
      estimate: estimates a stage of the run with a size.

    Raises:
      UserError: no size is possible.
    """
    section, found, error = section_of(stage), list[MicroBatches](), None
    for tokens in _sizes(estimate(config, stage)):
        try:
            run = estimate(with_tokens(config, section, tokens), stage)
        except UserError as refused:  # For example fewer tokens than a row has.
            error = refused
            continue
        tasks = [each for each in run.tasks if each.task.phase != "generate" and each.task.calls != 0]
        update = next(each.task for each in run.tasks if each.task.packed)
        seconds = sum(
            _filled(each, _seconds(run, policy, each), update.micro) * _calls_per_update(each, update) for each in tasks
        )
        if not found or seconds < found[-1].seconds:
            peak = max(each.peak for each in tasks)
            found.append(MicroBatches(stage, section, tokens, update.micro, seconds, peak, run.cluster.usable))
    if not found:
        raise error or UserError(f"stage {stage} has no micro-batches")
    for share in (1 - MARGIN, 1.0):
        fitting = [one for one in found if one.peak <= share * one.usable]
        if fitting:
            best = next(one for one in fitting if one.seconds <= ALIKE * fitting[-1].seconds)
            return found[found.index(best) :: -1]
    return found[:1]


def _sizes(run: RunEstimate) -> list[int]:
    """Tokens per device, ascending: those of all rows of a step in 1, 2, 3, 4, 6, 8, 12, 16, ... micro-batches, up to the
    number at which a micro-batch has the least rows."""
    task = next((each.task for each in run.tasks if each.task.packed), None)
    if task is None:
        return []
    mesh = run.config.mesh
    ways, turns = mesh.data * mesh.fsdp, mesh.pipeline_micro_batches or mesh.pipeline
    unit = math.lcm(ways * turns, task.unit)
    units = -(-task.rows.rows // unit)
    counts = {count for power in range(units.bit_length()) for count in (1 << power, 3 << power >> 1)} | {units}
    return sorted({-(-units // count) * unit * task.rows.length // ways for count in counts if count <= units})


def _calls_per_update(each: TaskEstimate, update) -> float:
    """Calls of a task per call of the update. Those of a run whose number of rows is unknown follow from the rows of a call."""
    if each.task.calls and update.calls:
        return each.task.calls / update.calls
    return 1 if each.task.packed else -(-update.rows.rows // each.task.rows.rows)


def _seconds(run: RunEstimate, policy: Model, each: TaskEstimate) -> float:
    """Seconds of one call of a task, if nothing overlaps."""
    return each.compute + each.memory + each.network + _kernel_seconds(run, policy, each)


def _kernel_seconds(run: RunEstimate, policy: Model, each: TaskEstimate) -> float:
    """The time that the kernels of a task take at least on a GPU; 0 on other devices."""
    task, adapted = each.task, policy.lora is not None
    if run.cluster.chip.kind != "gpu":
        return 0.0
    update = task.phase in KEPT
    per_layer = (_UPDATE_KERNELS if update else _FORWARD_KERNELS)[adapted]
    return KERNEL_SECONDS * per_layer * policy.config.layers * len(task.runs) * (task.micro * task.steps if update else 1)
