"""Measures held-out rows during training; early stopping keeps the best parameters and ends training when they stagnate."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxalign.parallel.rows import fetch
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.loop import Loop, StepFunction, Training

LOSS = "held_out_loss"
"""The metric that selects the parameters: lower is better."""
SCORE = "held_out_score"
"""The metric that selects the parameters in RL: higher is better."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoppingState:
    """A training state with the best parameters so far. Checkpoints contain all of it, so a resumed run is exact.

    Attributes:
      train: the newest training state.
      best_params: the parameters with the lowest held-out loss; the initial ones before the first evaluation.
      best_loss: float32 [], their held-out loss, or minus their score; infinity before the first evaluation.
      best_step: int32 [], the number of steps after which it was measured.
      worse: int32 [], the number of evaluations since then.
    """

    train: Any
    best_params: Any
    best_loss: jax.Array
    best_step: jax.Array
    worse: jax.Array


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """When and how to measure held-out rows, and when to stop.

    Attributes:
      every: steps between evaluations; the last step is always evaluated.
      patience: training ends after this many consecutive evaluations without a better result, and the best parameters are
        kept; None trains all steps and keeps the newest parameters.
      measure: `measure(params, completed) -> metrics`: the held-out metrics by name as Python numbers, among them `metric`, of
        the trained parameters after so many steps.
      metric: the metric that selects the parameters, `LOSS` or `SCORE`.
      params_of: returns the trained parameters of a training state.
    """

    every: int
    patience: int | None
    measure: Callable[[Any, int], Mapping[str, float]]
    metric: str = LOSS
    params_of: Callable[[Any], Any] = operator.attrgetter("params")

    def begin(self, loop: Loop, init: Callable[[], Any], abstract: Any, step: StepFunction) -> Training:
        """Prepares a run of the loop that measures held-out rows. Takes the arguments of `Loop.begin`.

        With patience, the state of the run is a `StoppingState`.
        """
        def is_due(completed: int) -> bool:
            return completed > 0 and (completed % self.every == 0 or completed == loop.total_steps)

        def measuring(state: Any, number: int):
            state, metrics = step(state, number)
            if not is_due(number + 1):
                return state, metrics
            return state, {"training": metrics} | dict(self.measure(self.params_of(state), number + 1))

        def stopping(state: StoppingState, number: int):
            train, metrics = measuring(state.train, number)
            state = dataclasses.replace(state, train=train)
            return self._update(state, number + 1, metrics) if is_due(number + 1) else state, metrics

        if self.patience is None:
            return loop.begin(init, abstract, measuring)

        def stop(state: Any, completed: int) -> bool:
            ended = loop.stop is not None and loop.stop(state.train, completed)
            return ended or (is_due(completed) and int(fetch(state.worse)) >= self.patience)

        loss, count = (jax.ShapeDtypeStruct((), dtype, sharding=abstract.step.sharding) for dtype in (np.float32, np.int32))
        abstract = StoppingState(abstract, self.params_of(abstract), loss, count, count)
        return dataclasses.replace(loop, stop=stop).begin(lambda: self._with_best(init(), math.inf, 0), abstract, stopping)

    def _update(self, state: StoppingState, completed: int, metrics: Mapping[str, Any]) -> StoppingState:
        """The state after an evaluation. A result that is not a number counts as worse."""
        loss = metrics[self.metric] if self.metric == LOSS else -metrics[self.metric]
        if loss < float(fetch(state.best_loss)):
            return self._with_best(state.train, loss, completed)
        worse = np.int32(int(fetch(state.worse)) + 1)
        return dataclasses.replace(state, worse=jax.device_put(worse, state.train.step.sharding))

    def _with_best(self, state: Any, loss: float, step: int) -> StoppingState:
        """The state in which the current parameters are the best. Scalars are on the devices of the state's other scalars."""
        scalars = (jax.device_put(x, state.step.sharding) for x in (np.float32(loss), np.int32(step), np.int32(0)))
        return StoppingState(state, copy_params(self.params_of(state)), *scalars)
