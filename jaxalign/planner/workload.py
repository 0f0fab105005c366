"""The work of a run: every kind of jitted step of its stages, on how many rows of what length, and how often."""

from __future__ import annotations

import dataclasses
import math

from jaxalign.config import Config
from jaxalign.planner.memory import Rows
from jaxalign.registry.stages import stages_in_order
from jaxalign.training.packed import pair_rows, part_rows


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of step.

    Attributes:
      stage: the stage's name.
      phase: "generate", "score" or "update"; a reward model's scoring is "reward".
      runs: the roles whose models compute.
      trains: those of `runs` that learn.
      stays: the roles whose weights stay on the devices during the step, all of `runs` among them.
      rows: the rows of one call; of an update, those of one optimizer step.
      counted: positions of a row at which the LM head is computed; 0 where it is not used.
      calls: calls in the whole run; None where the number follows from data that is not at hand.
      micro: the parts in which an update computes its rows.
      steps: optimizer steps of one call.
      unit: rows that stay together in a part: 2 where rows are pairs.
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
        return f"{self.stage} {self.phase}"

    @property
    def tokens(self) -> int:
        """Tokens of one call: the new ones of a step that generates, else all that it reads."""
        return self.rows.rows * (self.rows.new or self.rows.length) * self.steps

    @property
    def part(self) -> Rows:
        """The rows of one micro-batch of an update."""
        return Rows(self.rows.rows // self.micro, self.rows.length)


def tasks(config: Config, prompt: int | None = None, examples: int | None = None) -> list[Task]:
    """The tasks of config.stages, in their order, as the stages' records give them.

    Args:
      config: the run's config.
      prompt: tokens of the longest prompt; None: as many as model.max_length leaves beside the new ones.
      examples: rows or pairs of the data file, where the number of steps follows from it.
    """
    found = []
    for record in stages_in_order(config.stages):
        workload = record.load("workload")
        if workload is not None:
            found += workload(config, prompt, examples)
    return found


def prompt_length(config: Config, new: int, prompt: int | None) -> int:
    """Tokens of a prompt beside `new` sampled ones: `prompt`, or as many as there is room for."""
    return prompt or config.model.max_length - new


def calls_for(total: float | None, batch: int) -> int | None:
    """The calls that `total` rows take in batches of `batch`; None where the total is not known."""
    return None if total is None else math.ceil(total / batch)


def generate(config: Config, stage: str, rows: int, new: int, prompt: int | None, calls: int | None, stays: tuple[str, ...],
             role: str = "policy") -> Task:
    """Sampling of `new` tokens in each of `rows` rows by one role, while others stay on the devices."""
    lengths = Rows(rows, prompt_length(config, new, prompt), new)
    return Task(stage, "generate", (role,), (), tuple(dict.fromkeys((role, *stays))), lengths, 1, calls)


def lm_update(stage: str, rows: int, row_length: int, micro_batches: int, calls: int | None) -> Task:
    """Next-token training of the policy on packed rows."""
    policy = ("policy",)
    return Task(stage, "update", policy, policy, policy, Rows(rows, row_length), row_length - 1, calls, micro_batches or 1)


def packed_parts(config: Config, count: int, length: int, tokens: int, pairs: bool = False,
                 whole: bool = False) -> tuple[Rows, int]:
    """How a batch of sequences is packed into micro-batches where all are as long as they may be.

    Args:
      config: the run's config, whose mesh splits the rows.
      count: sequences, or pairs of them.
      length: tokens of a sequence.
      tokens: tokens of a micro-batch; 0: one micro-batch.
      pairs: `count` is of pairs, which stay together.
      whole: all pairs are computed in one micro-batch.

    Returns:
      The rows of a micro-batch, and the number of micro-batches.
    """
    mesh = config.mesh
    split = mesh.data * mesh.fsdp, mesh.data * mesh.fsdp * (mesh.pipeline_micro_batches or mesh.pipeline)
    rows, parts = pair_rows(count, length, tokens, *split, whole) if pairs else part_rows(count, length, tokens, *split)
    return Rows(rows, length), parts


def packed_update(stage: str, trained: tuple[str, ...], stays: tuple[str, ...], packed: tuple[Rows, int], counted: int,
                  calls: int | None, steps: int = 1, unit: int = 2) -> Task:
    """An update over all of the packed micro-batches `packed`, as `packed_parts` gives them."""
    part, parts = packed
    rows = Rows(part.rows * parts, part.length)
    return Task(stage, "update", trained, trained, stays, rows, counted, calls, parts, steps, unit)
