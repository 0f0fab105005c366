"""Selects the prompts of each iteration of RL."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxalign.data.loader import EpochLoader
from jaxalign.records import Prompt

BUCKET = 8
"""Prompts are padded to a multiple of this many tokens."""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """The rows of one iteration. Rows with the same prompt are neighbours.

    Attributes:
      prompts: the prompt of each row, for rewards.
      ids: the token ids of each row's prompt.
      rows: the global row numbers, which determine each row's random numbers.
    """

    prompts: list[Prompt]
    ids: list[Sequence[int]]
    rows: range


@dataclasses.dataclass(frozen=True)
class PromptStream:
    """All prompts of a run, in a new order each epoch. Iteration `step` is a pure function of (seed, step).

    If there are fewer prompts than an iteration needs, they repeat within it.

    Attributes:
      prompts: the distinct prompts.
      ids: their token ids.
      batch: the number of responses per iteration.
      group_size: the number of responses to each prompt.
      seed, stream: select the order.
    """

    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    batch: int
    group_size: int
    seed: int
    stream: int

    def at(self, step: int) -> PromptBatch:
        """The rows of iteration `step`."""
        loader = EpochLoader(len(self.ids), self.batch // self.group_size, self.seed, self.stream)
        index = [int(i) for i in loader.indices(step) for _ in range(self.group_size)]
        rows = range(step * self.batch, (step + 1) * self.batch)
        return PromptBatch([self.prompts[i] for i in index], [self.ids[i] for i in index], rows)

    @property
    def width(self) -> int:
        """The length to which prompts are padded. It is the same for all iterations, so that programs are compiled once."""
        return -(-max(map(len, self.ids)) // BUCKET) * BUCKET
