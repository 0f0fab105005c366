"""Which rows make up batch number `step`: a pure function of (seed, step), so the step is the data cursor."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class EpochLoader:
    """Shuffles `rows` afresh each epoch; a last incomplete batch is filled up from the next epoch's order.

    stream tells apart the shuffles of different uses of one seed.
    """

    rows: int
    batch: int
    seed: int
    stream: int = 0

    def __post_init__(self):
        if self.rows < 1:
            raise UserError("there is not a single row to train on")

    def steps(self, epochs: float) -> int:
        """How many batches make up so many epochs (at least one)."""
        return max(1, round(self.rows * epochs / self.batch))

    def indices(self, step: int) -> np.ndarray:
        """int64 [batch]."""
        first, last = step * self.batch, (step + 1) * self.batch
        epochs = range(first // self.rows, (last - 1) // self.rows + 1)
        order = np.concatenate([self._order(epoch) for epoch in epochs])
        offset = epochs[0] * self.rows
        return order[first - offset : last - offset]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.stream, epoch]).permutation(self.rows)


def take(arrays, index: np.ndarray):
    """Rows `index` of every array of a record."""
    return jax.tree.map(lambda x: x[index], arrays)
