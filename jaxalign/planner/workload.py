"""The tasks of a run: each kind of jitted step of its stages, with its number of calls and the shape of its rows."""

from __future__ import annotations

import dataclasses
import math

from jaxalign.config import Config, rounds
from jaxalign.planner.memory import Rows
from jaxalign.registry.stages import stages_in_order
from jaxalign.training.packed import pair_rows, part_rows


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of jitted step.

    Attributes:
      stage: the stage's name.
      phase: "generate", "score", "update" or, for scoring by a reward model, "reward".
      runs: the roles with models that run in the step.
      trains: the subset of `runs` that is trained.
      stays: the roles with weights on the devices during the step, including `runs`.
      rows: the rows of one call; for an update, of one optimizer step.
      counted: positions of a row at which the LM head is computed; 0 if the step does not use it.
      calls: calls in the whole run; None if the number depends on unknown data.
      micro: the number of micro-batches of an update.
      steps: optimizer steps in one call.
      unit: the number of rows that must stay in one micro-batch: 2 for pairs.
    """

    stage: str
    phase: str
    runs: tuple[str, ...]
    trains: tuple[str, ...]
    stays: tuple[str, ...]
    rows: Rows
    counted: int
    calls: int | None
    micro: int = 1
    steps: int = 1
    unit: int = 1

    @property
    def name(self) -> str:
        return f"{self.stage} {self.phase}" + (f" ({self.runs[0]})" if self.runs[0].startswith("judge") else "")

    @property
    def tokens(self) -> int:
        """Tokens of one call: the sampled tokens if the step generates, else the tokens that it reads."""
        return self.rows.rows * (self.rows.new or self.rows.length) * self.steps

    @property
    def part(self) -> Rows:
        """The rows of one micro-batch of an update."""
        return Rows(self.rows.rows // self.micro, self.rows.length)


def tasks(config: Config, prompt: int | None = None, examples: int | None = None) -> list[Task]:
    """The tasks of config.stages, in order, from the stages' registry records.

    The calls of a stage that every round repeats (`config.rounds`) are those of all rounds.

    Args:
      config: the run's config.
      prompt: tokens of the longest prompt; None: model.max_length minus the response.
      examples: rows or pairs of the data file, for stages with a number of steps that depends on it; None if unknown.
    """
    found: list[Task] = []
    for record in stages_in_order(config.stages):
        workload = record.load("workload")
        if workload is not None:
            found += workload(config, prompt, examples)
    if config.rounds == 1:
        return found
    repeated = rounds.repeated_stages(config)
    calls = [task.calls and task.calls * (config.rounds if task.stage in repeated else 1) for task in found]
    return [dataclasses.replace(task, calls=count) for task, count in zip(found, calls, strict=True)]


def prompt_length(config: Config, new: int, prompt: int | None) -> int:
    """Tokens of the longest prompt: `prompt`, or by default model.max_length minus `new` sampled tokens."""
    return prompt or config.model.max_length - new


def calls_for(total: float | None, batch: int) -> int | None:
    """The number of calls for `total` rows in batches of `batch`; None if the total is unknown."""
    return None if total is None else math.ceil(total / batch)


def generate(config: Config, stage: str, rows: int, new: int, prompt: int | None, calls: int | None, stays: tuple[str, ...],
             role: str = "policy") -> Task:
    """Sampling of `new` tokens for each of `rows` rows by one role, while the roles in `stays` are on the devices."""
    lengths = Rows(rows, prompt_length(config, new, prompt), new)
    return Task(stage, "generate", (role,), (), tuple(dict.fromkeys((role, *stays))), lengths, 1, calls)


def lm_update(stage: str, rows: int, row_length: int, micro_batches: int, calls: int | None) -> Task:
    """Next-token training of the policy on packed rows."""
    policy = ("policy",)
    return Task(stage, "update", policy, policy, policy, Rows(rows, row_length), row_length - 1, calls, micro_batches or 1)


def packed_parts(config: Config, count: int, length: int, tokens: int, pairs: bool = False,
                 whole: bool = False) -> tuple[Rows, int]:
    """Packs a batch of sequences, all of maximum length, into micro-batches.

    Args:
      config: the run's config; its mesh splits the rows.
      count: the number of sequences or, with `pairs`, of pairs.
      length: the maximum tokens of a sequence.
      tokens: tokens per device in a micro-batch; 0: the default of `training.packed.part_rows`.
      pairs: whether the sequences are pairs, which stay in one micro-batch.
      whole: whether all pairs are in one micro-batch.

    Returns:
      The rows of a micro-batch, and the number of micro-batches.
    """
    mesh = config.mesh
    split = mesh.data * mesh.fsdp, mesh.data * mesh.fsdp * (mesh.pipeline_micro_batches or mesh.pipeline)
    rows, parts = pair_rows(count, length, tokens, *split, whole) if pairs else part_rows(count, length, tokens, *split)
    return Rows(rows, length), parts


def packed_update(stage: str, trained: tuple[str, ...], stays: tuple[str, ...], packed: tuple[Rows, int], counted: int,
                  calls: int | None, steps: int = 1, unit: int = 2) -> Task:
    """An update over the micro-batches that `packed_parts` returned as `packed`."""
    part, parts = packed
    rows = Rows(part.rows * parts, part.length)
    return Task(stage, "update", trained, trained, stays, rows, counted, calls, parts, steps, unit)
