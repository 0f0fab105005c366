"""Runs a jitted training step: reads the starting weights, builds each step's arguments, and drives the loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax

from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel.ahead import Ahead
from jaxalign.planner.hardware import chip_of
from jaxalign.tracking.timing import Timing
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.early_stopping import EarlyStopping, StoppingState
from jaxalign.training.loop import Loop, Step, Training
from jaxalign.training.state import TrainState, abstract_state, init_state

Frozen = Params | None


@dataclasses.dataclass(frozen=True)
class Start:
    """A model and the functions that read its weights. Weights are read while programs compile.

    Attributes:
      model: the architecture to train.
      weights: reads the weights that training starts from; with adapters, joined with the base. A reference may also use them.
      trained: takes those weights and returns the part to train, in buffers that training may donate.
      frozen: reads the base under the adapters; returns None without adapters.
      abstract_frozen: the base under the adapters as ShapeDtypeStructs.
    """

    model: Model
    weights: Callable[[], Params]
    trained: Callable[[Params], Params]
    frozen: Callable[[], Frozen]
    abstract_frozen: Frozen = None


def start_of(model: LanguageModel) -> Start:
    """The start of training from a language model, whose own weights are not changed."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.frozen)
    return Start(
        model.model,
        weights=lambda: model.weights,
        trained=lambda _: copy_params(model.params),
        frozen=lambda: model.frozen,
        abstract_frozen=shapes,
    )


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a training run other than model, data and config section.

    Attributes:
      seed: seeds the order of the rows.
      key: the PRNG key of the training state.
      loop: `loop(total_steps, checkpoint_every, **fields) -> Loop`, which sets the directory and the trackers of the run.
      directory: the run's output folder; None for a run in memory.
      timing: `timing() -> Timing`, the timer of work outside the loop; None for no timing.
    """

    seed: int
    key: jax.Array
    loop: Callable[..., Loop]
    directory: Path | None = None
    timing: Callable[[], Timing] | None = None

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Times work outside the loop. The caller sets the fields tokens and flops of the yielded object."""
        return contextlib.nullcontext(_Untimed()) if self.timing is None else self.timing().phase(name)


class _Untimed:
    """Accepts the fields of a timed phase."""

    tokens, flops = 0, 0.0


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted training step and the functions that give its arguments and its work by step number.

    Attributes:
      step: `step(state, arguments) -> (state, metrics)`; the metrics are one of the records in `training.metrics`.
      arguments: `arguments(frozen, number) -> record`: the batch and every other argument but the state.
      tokens: the number of tokens that a step trains on; None if the metrics contain it.
      flops: the FLOPs of a step.
      shown: the metrics that the progress bar shows.
    """

    step: Callable
    arguments: Callable[[Frozen, int], Any]
    flops: Callable[[int], float]
    tokens: Callable[[int], int] | None = None
    shown: tuple[str, ...] = ("loss",)


class Fit:
    """One complete training run.

    Attributes:
      training: the running loop, whose `state` is the newest state; None before it begins.
      frozen: the base under the adapters, once it has been read.
      stopping: the early stopping of the run; None without it. The state of `training` is then a `StoppingState`.
    """

    def __init__(self, start: Start, optimizer: optax.GradientTransformation, run: RunSettings):
        self.start, self.optimizer, self.run = start, optimizer, run
        self.training: Training | None = None
        self.frozen: Frozen = None
        self.stopping: EarlyStopping | None = None

    @property
    def state(self) -> TrainState | None:
        """The newest training state, which the next step donates; None before training begins."""
        found = None if self.training is None else self.training.state
        return found if found is None or self.stopping is None else found.train

    @property
    def params(self) -> Params:
        """The trained parameters: the newest ones, which the next step donates, or the best ones with early stopping."""
        return self.state.params if self.stopping is None else self.training.state.best_params

    @property
    def weights(self) -> Params:
        """The trained parameters; with adapters, joined with the base."""
        return join(self.frozen, self.params)

    def steps(
        self,
        program: Program,
        total_steps: int,
        checkpoint_every: int,
        prepare: Callable[[], Params] | None = None,
        stopping: EarlyStopping | None = None,
        **loop: Any,
    ) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          program: the step. It compiles while weights are read.
          total_steps: the number of steps.
          checkpoint_every: steps between checkpoints.
          prepare: does the work that must precede the first step and returns the starting weights. If None, the starting
            weights are read only if there is no checkpoint.
          stopping: ends training early; None trains all steps.
          loop: other fields of the `Loop`.
        """
        model, self.stopping = self.start.model, stopping
        abstract = abstract_state(model, self.optimizer)
        if stopping is not None:
            loop["stop"] = lambda state, completed: stopping.evaluates(completed, total_steps) and stopping.ends(state)
        made = self.run.loop(total_steps, checkpoint_every, shown=program.shown, flops=program.flops, **loop)
        with Ahead() as ahead:
            ahead.add(program.step, lambda: (abstract, program.arguments(self.start.abstract_frozen, 0)))
            weights = prepare() if prepare else None
            self.frozen = self.start.frozen()

            def init():
                read = self.start.weights() if weights is None else weights
                state = init_state(model, self.optimizer, self.start.trained(read), self.run.key)
                return state if stopping is None else stopping.begin(state)

            def train_step(state: TrainState, number: int):
                state, metrics = program.step(state, program.arguments(self.frozen, number))
                if program.tokens is not None:
                    metrics = dataclasses.replace(metrics, tokens=program.tokens(number))
                return state, metrics

            def stopping_step(state: StoppingState, number: int):
                train, metrics = train_step(state.train, number)
                state, completed = dataclasses.replace(state, train=train), number + 1
                if not stopping.evaluates(completed, total_steps):
                    return state, metrics
                state, held_out = stopping.update(state, completed)
                return state, {"training": metrics} | held_out

            if stopping is None:
                self.training = made.begin(init, abstract, train_step)
            else:
                self.training = made.begin(init, stopping.abstract(abstract), stopping_step)
            yield from self.training


def peak_flops(model: Model) -> float:
    """The peak FLOP/s of all of the model's devices together; 0 if unknown."""
    devices = model.sharding.mesh.devices
    chip = chip_of(devices.flat[0].device_kind)
    return 0.0 if chip is None else devices.size * chip.flops(model.config.compute_dtype)
