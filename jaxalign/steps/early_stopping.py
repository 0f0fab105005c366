"""Early stopping: measures a held-out loss during training, keeps the best parameters, and ends training when it stagnates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxalign.parallel.rows import fetch
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.state import TrainState

LOSS = "held_out_loss"
"""The metric that selects the parameters: lower is better."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoppingState:
    """A training state with the best parameters so far. Checkpoints contain all of it, so a resumed run is exact.

    Attributes:
      train: the newest training state.
      best_params: the parameters with the lowest held-out loss; the initial ones before the first evaluation.
      best_loss: float32 [], their held-out loss; infinity before the first evaluation.
      best_step: int32 [], the number of steps after which it was measured.
      worse: int32 [], the number of evaluations since then.
    """

    train: TrainState
    best_params: Any
    best_loss: jax.Array
    best_step: jax.Array
    worse: jax.Array


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """When and how to measure the held-out loss.

    Attributes:
      every: steps between evaluations; the last step is always evaluated.
      patience: training ends after this many consecutive evaluations without a lower loss.
      measure: `measure(params) -> metrics`, the held-out metrics by name as Python numbers, among them `LOSS`; takes the
        trained parameters.
    """

    every: int
    patience: int
    measure: Callable[[Any], Mapping[str, float]]

    def begin(self, state: TrainState) -> StoppingState:
        """The state before the first step."""
        return _with_best(state, math.inf, 0)

    def abstract(self, state: TrainState) -> StoppingState:
        """The state as ShapeDtypeStructs, for restoring a checkpoint, from those of the training state."""
        loss, count = (jax.ShapeDtypeStruct((), dtype, sharding=state.step.sharding) for dtype in (np.float32, np.int32))
        return StoppingState(state, state.params, loss, count, count)

    def evaluates(self, completed: int, total_steps: int) -> bool:
        """Whether the held-out loss is measured after so many completed steps."""
        return completed > 0 and (completed % self.every == 0 or completed == total_steps)

    def update(self, state: StoppingState, completed: int) -> tuple[StoppingState, Mapping[str, float]]:
        """(the state after an evaluation, the held-out metrics). A loss that is not a number counts as worse."""
        metrics = self.measure(state.train.params)
        if metrics[LOSS] < float(fetch(state.best_loss)):
            return _with_best(state.train, metrics[LOSS], completed), metrics
        worse = np.int32(int(fetch(state.worse)) + 1)
        return dataclasses.replace(state, worse=jax.device_put(worse, state.train.step.sharding)), metrics

    def ends(self, state: StoppingState) -> bool:
        """Whether the patience is exhausted."""
        return int(fetch(state.worse)) >= self.patience


def _with_best(state: TrainState, loss: float, step: int) -> StoppingState:
    """The state in which the current parameters are the best. Scalars are on the devices of the state's other scalars."""
    scalars = (jax.device_put(x, state.step.sharding) for x in (np.float32(loss), np.int32(step), np.int32(0)))
    return StoppingState(state, copy_params(state.params), *scalars)
