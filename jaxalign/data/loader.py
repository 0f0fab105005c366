"""Which rows make up batch number `step`: a pure function of (seed, step), so the step is the data cursor."""

from __future__ import annotations

import dataclasses
import functools

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
        order = np.concatenate([_kept_order(self, epoch) for epoch in epochs])
        offset = epochs[0] * self.rows
        return order[first - offset : last - offset]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.stream, epoch]).permutation(self.rows)


@dataclasses.dataclass(frozen=True)
class MixtureLoader(EpochLoader):
    """Rows of several sources, which stand one after another; each makes up its share of every epoch.

    An epoch has as many rows as all sources together (`rows` is the sum of `sizes`). A source is gone through in shuffled
    order from epoch to epoch: none of its rows comes again before all others have come.
    """

    sizes: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def _order(self, epoch: int) -> np.ndarray:
        ends = np.rint(np.cumsum(self.shares) / sum(self.shares) * self.rows).astype(int)
        found, start, begin = [], 0, 0
        for number, (size, end) in enumerate(zip(self.sizes, ends, strict=True)):
            if end > begin:
                own = EpochLoader(size, int(end - begin), self.seed, 1000 * (self.stream + 1) + number)
                found.append(start + own.indices(epoch))
            start, begin = start + size, end
        mixed = np.concatenate(found)
        return mixed[super()._order(epoch)]


@functools.lru_cache(maxsize=2)
def _kept_order(loader: EpochLoader, epoch: int) -> np.ndarray:
    """An epoch's order, which all of its steps ask for; not to be written to."""
    return loader._order(epoch)


def take(arrays, index: np.ndarray):
    """Rows `index` of every array of a record."""
    return jax.tree.map(lambda x: x[index], arrays)
