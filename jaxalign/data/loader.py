"""Selects the rows of each batch, as a pure function of (seed, step). A checkpoint therefore saves only the step."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class EpochLoader:
    """Reshuffles the rows in each epoch. An incomplete last batch is filled from the next epoch.

    Attributes:
      rows: the number of rows.
      batch: rows per batch.
      seed: the run's seed.
      stream: separates the shuffles of different uses of one seed (`jaxalign.streams.LOADERS`).
    """

    rows: int
    batch: int
    seed: int
    stream: int = 0

    def __post_init__(self):
        if self.rows < 1:
            raise UserError("there are no rows to train on; give a data set with at least one")

    def steps(self, epochs: float) -> int:
        """The number of batches in `epochs` epochs, at least 1."""
        return max(1, round(self.rows * epochs / self.batch))

    def indices(self, step: int) -> np.ndarray:
        """The rows of batch `step`: int64 [batch]."""
        first, last = step * self.batch, (step + 1) * self.batch
        epochs = range(first // self.rows, (last - 1) // self.rows + 1)
        order = np.concatenate([_kept_order(self, epoch) for epoch in epochs])
        offset = epochs[0] * self.rows
        return order[first - offset : last - offset]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.stream, epoch]).permutation(self.rows)


@dataclasses.dataclass(frozen=True)
class MixtureLoader(EpochLoader):
    """Rows of several concatenated sources, each with a fixed share of every epoch.

    An epoch has as many rows as all sources together. Each source is traversed in shuffled order across epochs: no row repeats
    before all rows of its source have been used.

    Attributes:
      sizes: the number of rows of each source; their sum is `rows`.
      shares: the relative share of each source.
    """

    sizes: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def _order(self, epoch: int) -> np.ndarray:
        ends = np.rint(np.cumsum(self.shares) / sum(self.shares) * self.rows).astype(int)
        parts, start, begin = [], 0, 0
        for source, (size, end) in enumerate(zip(self.sizes, ends, strict=True)):
            if end > begin:
                loader = EpochLoader(size, int(end - begin), self.seed, 1000 * (self.stream + 1) + source)
                parts.append(start + loader.indices(epoch))
            start, begin = start + size, end
        mixed = np.concatenate(parts)
        return mixed[super()._order(epoch)]


@dataclasses.dataclass(frozen=True)
class InOrder:
    """Selects the rows of `RowsOnDemand`, which are shuffled already: batch n has the positions from n * batch."""

    batch: int

    def indices(self, step: int) -> np.ndarray:
        """The positions of batch `step`: int64 [batch]."""
        return np.arange(step * self.batch, (step + 1) * self.batch)


class RowsOnDemand(abc.ABC):
    """Rows of arrays that are made when a batch needs them, in an endless order."""

    @property
    @abc.abstractmethod
    def kind(self) -> type:
        """The record of the rows."""

    @abc.abstractmethod
    def take(self, index: np.ndarray) -> Any:
        """The rows at some positions, as a record of numpy arrays; the same rows in every call and every process."""


@functools.lru_cache(maxsize=2)
def _kept_order(loader: EpochLoader, epoch: int) -> np.ndarray:
    """An epoch's order, cached because all steps of the epoch need it. Do not modify it."""
    return loader._order(epoch)


def take(arrays, index: np.ndarray):
    """Rows `index` of every array of a pytree, or of rows on demand."""
    if isinstance(arrays, RowsOnDemand):
        return arrays.take(index)
    return jax.tree.map(lambda x: x[index], arrays)
