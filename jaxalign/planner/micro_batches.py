"""Chooses the size of micro-batches for the devices that a run has: `micro_batch_tokens=auto`.

A larger micro-batch gathers and reads the weights less often, and needs more memory. The choice is the fastest size that fits
by the estimate; of sizes that are as fast, the smallest. Results do not depend on it, but for rounding.

The times compare sizes; they are no forecast. They add computing, memory and network, as if none of them overlapped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from jaxalign.config import Config
from jaxalign.config.sections.shared import AUTO
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.planner.estimate import RunEstimate, TaskEstimate
from jaxalign.planner.work import KERNEL_SECONDS
from jaxalign.registry.stages import stages_in_order

ALIKE = 1.01
"""Times within this factor are alike: the estimate is coarser."""
MARGIN = 0.05
"""The share of the memory that a choice leaves free if it can: the estimate may be too low by as much."""
_OWNERS = {"online_dpo": "dpo"}
"""The section with the micro-batches of a stage, if it is not that of the stage's name."""
_GB = 1e9
_FORWARD_KERNELS, _UPDATE_KERNELS = (31, 42), (105, 154)
"""GPU kernels of a layer without and with adapters: of a forward pass, and of both passes with the recomputed forward pass.
Counted in the compiler's programs of Llama-3.1-8B on h100:1x8 and, with adapters, of Llama-3.2-1B."""

Estimate = Callable[[Config], RunEstimate]
"""Returns the estimate of a run with a config without "auto". Raises UserError if the run is not possible."""


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A size of the micro-batches of one stage.

    Attributes:
      stage: the stage.
      section: the config section with `micro_batch_tokens`.
      tokens: the value of `micro_batch_tokens`; 0 is the default.
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
                f"estimate is {self.peak / _GB:.1f} of {self.usable / _GB:.1f} GB")


def section_of(stage: str) -> str:
    """The name of the section with the micro-batches of a stage."""
    return _OWNERS.get(stage, stage)


def is_auto(config: Config, stage: str) -> bool:
    """Whether the size of the micro-batches of a stage is to be chosen."""
    return getattr(getattr(config, section_of(stage), None), "micro_batch_tokens", None) == AUTO


def with_tokens(config: Config, section: str, tokens: int) -> Config:
    """The config with a size of the micro-batches."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), micro_batch_tokens=tokens)})


def with_defaults(config: Config) -> Config:
    """The config with the default instead of each "auto"."""
    for name in dict.fromkeys(section_of(record.name) for record in stages_in_order(config.stages)):
        if is_auto(config, name):
            config = with_tokens(config, name, 0)
    return config


def resolved(config: Config, policy: Model, estimate: Estimate) -> tuple[Config, tuple[MicroBatches, ...]]:
    """(the config with a size instead of each "auto", the choices).

    Of two stages with one section, the choice is that of the smaller size, which fits both.
    """
    found: dict[str, MicroBatches] = {}
    defaults = with_defaults(config)
    for record in stages_in_order(config.stages):
        if is_auto(config, record.name):
            best = choices(defaults, record.name, policy, estimate)[0]
            other = found.get(best.section)
            found[best.section] = best if other is None else min(best, other, key=lambda one: one.tokens)
    for name, choice in found.items():
        defaults = with_tokens(defaults, name, choice.tokens)
    return defaults, tuple(found.values())


def choices(config: Config, stage: str, policy: Model, estimate: Estimate) -> list[MicroBatches]:
    """The sizes for a stage, the best first: sizes that fit with `MARGIN`, then those that fit without it, both from the best
    to the smallest; then the smallest size of all.

    Args:
      config: the run's config, without "auto".
      stage: the stage.
      policy: the run's model.
      estimate: estimates the run with a size.

    Raises:
      UserError: no size is possible.
    """
    found, error = [], UserError(f"stage {stage} has no micro-batches")
    for tokens in _sizes(estimate(config), stage):
        try:
            found.append(_estimated(estimate(with_tokens(config, section_of(stage), tokens)), policy, stage, tokens))
        except UserError as refused:  # For example fewer tokens than a row has.
            error = refused
    if not found:
        raise error
    ordered: list[MicroBatches] = []
    for share in (1 - MARGIN, 1.0):
        fitting = [one for one in found if one.peak <= share * one.usable]
        fastest = min((one.seconds for one in fitting), default=0.0)
        best = min((one for one in fitting if one.seconds <= ALIKE * fastest), key=lambda one: one.tokens, default=None)
        if best is not None:
            smaller = sorted((one for one in fitting if one.tokens < best.tokens), key=lambda one: -one.tokens)
            ordered += [one for one in (best, *smaller) if one not in ordered]
    smallest = min(found, key=lambda one: one.tokens)
    return ordered if smallest in ordered else [*ordered, smallest]


def _sizes(run: RunEstimate, stage: str) -> Iterator[int]:
    """Tokens per device: those of all rows of a step in 1, 2, 3, 4, 6, 8, 12, 16, ... micro-batches, down to the least rows."""
    task = next((each.task for each in run.tasks if each.task.stage == stage and each.task.packed), None)
    if task is None:
        return
    mesh, length = run.config.mesh, task.rows.length
    ways, turns = mesh.data * mesh.fsdp, mesh.pipeline_micro_batches or mesh.pipeline
    unit = math.lcm(ways * turns, task.unit)
    units = -(-task.rows.rows // unit)
    counts = sorted({count for power in range(units.bit_length()) for count in (1 << power, 3 << power >> 1)} | {units})
    sizes = {-(-units // count) * unit * length // ways for count in counts if count <= units}
    yield from sorted(sizes, reverse=True)


def _estimated(run: RunEstimate, policy: Model, stage: str, tokens: int) -> MicroBatches:
    """The estimate of a stage with a size. The estimate is for full rows; in a run half of the last micro-batch is padding."""
    tasks = [each for each in run.tasks if each.task.stage == stage and each.task.phase != "generate"]
    update = next(each.task for each in tasks if each.task.packed)
    calls = update.calls or 1
    seconds = sum(_seconds(run, policy, each) * (each.task.calls or 1) for each in tasks) / calls
    seconds *= 1 + 1 / (2 * update.micro)
    return MicroBatches(
        stage, section_of(stage), tokens, update.micro, seconds, max(each.peak for each in tasks), run.cluster.usable
    )


def _seconds(run: RunEstimate, policy: Model, each: TaskEstimate) -> float:
    """Seconds of one call of a task, if nothing overlaps. On a GPU each kernel takes the time that a kernel takes at least."""
    task, adapted, kernels = each.task, policy.lora is not None, 0
    if run.cluster.chip.kind == "gpu":
        update = task.phase in ("update", "checks")
        per_layer = (_UPDATE_KERNELS if update else _FORWARD_KERNELS)[adapted]
        kernels = per_layer * policy.config.layers * len(task.runs) * (task.micro * task.steps if update else 1)
    return each.compute + each.memory + each.network + kernels * KERNEL_SECONDS
