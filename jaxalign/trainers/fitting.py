"""One run of a jitted training step: where its weights come from, how it is called, and the loop around it."""

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
from jaxalign.parallel.rows import placed
from jaxalign.planner.hardware import chip_of
from jaxalign.tracking.timing import Timing
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.loop import Loop, Step, Training
from jaxalign.training.state import abstract_state, init_state

Frozen = Params | None


@dataclasses.dataclass(frozen=True)
class Start:
    """A model and where its weights come from. Weights are read late, while programs are compiled.

    Attributes:
      model: the architecture that is trained.
      weights: reads the weights that training starts from, joined with those under adapters; a reference reads them too.
      trained: the trained part of these weights, in buffers that training may donate.
      frozen: reads the parameters under adapters; None without adapters.
      abstract_frozen: ShapeDtypeStructs of these.
      like: arrays on the device where a model without a mesh is trained; None for the default device.
    """

    model: Model
    weights: Callable[[], Params]
    trained: Callable[[Params], Params]
    frozen: Callable[[], Frozen]
    abstract_frozen: Frozen = None
    like: Params | None = None


def start_of(model: LanguageModel) -> Start:
    """Training that starts from a language model, whose weights stay as they are."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_place(x)), model.frozen)
    return Start(
        model.model,
        weights=lambda: model.weights,
        trained=lambda _: placed(copy_params(model.params)),
        frozen=lambda: model.frozen,
        abstract_frozen=placed(shapes, model.params),
        like=model.params,
    )


def _place(x: jax.Array):
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a training run other than model, data and config section.

    Attributes:
      seed: of the order of the rows.
      key: the PRNG key of the training state.
      loop: `loop(total_steps, checkpoint_every, **fields) -> Loop`, with the directory and the trackers of the run.
      directory: where the run writes; None for a run in memory.
      timing: `timing() -> Timing` of work outside the loop; None where nothing is timed.
    """

    seed: int
    key: jax.Array
    loop: Callable[..., Loop]
    directory: Path | None = None
    timing: Callable[[], Timing] | None = None

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Times work outside the loop; yields an object with the fields tokens and flops."""
        return contextlib.nullcontext(_Untimed()) if self.timing is None else self.timing().phase(name)


class _Untimed:
    """Accepts the fields of a timed phase."""

    tokens, flops = 0, 0.0


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted training step and how it is called in each step of a run.

    Attributes:
      step: `step(state, arguments) -> (state, metrics)`.
      arguments: `arguments(frozen, number) -> record`; the batch of a step and all else but the state.
      tokens: the number of tokens that a step learns from; None where the metrics have it.
      flops: the FLOPs of a step.
      shown: the metrics that the progress bar shows.
    """

    step: Callable
    arguments: Callable[[Frozen, int], Any]
    flops: Callable[[int], float]
    tokens: Callable[[int], int] | None = None
    shown: tuple[str, ...] = ("loss",)


class Fit:
    """One run of a training step from start to end.

    Attributes:
      training: the running loop, whose `state` is the newest; None before it begins.
      frozen: the parameters under adapters, once read.
    """

    def __init__(self, start: Start, optimizer: optax.GradientTransformation, run: RunSettings):
        self.start, self.optimizer, self.run = start, optimizer, run
        self.training: Training | None = None
        self.frozen: Frozen = None

    @property
    def params(self) -> Params:
        """The trained parameters of the newest state; the next step donates them."""
        return self.training.state.params

    @property
    def weights(self) -> Params:
        """The newest parameters joined with those under adapters."""
        return join(self.frozen, self.params)

    def steps(
        self,
        program: Program,
        total_steps: int,
        checkpoint_every: int,
        prepare: Callable[[], Params] | None = None,
        **loop: Any,
    ) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          program: the step. It is compiled while weights are read.
          total_steps: the number of steps.
          checkpoint_every: steps between checkpoints.
          prepare: reads the starting weights and does what must precede the first step; None reads them only where there is
            no checkpoint.
          loop: further fields of the `Loop`.
        """
        model = self.start.model
        abstract = placed(abstract_state(model, self.optimizer), self.start.like)
        made = self.run.loop(total_steps, checkpoint_every, shown=program.shown, flops=program.flops, **loop)
        with Ahead() as ahead:
            ahead.add(program.step, lambda: (abstract, program.arguments(self.start.abstract_frozen, 0)))
            weights = prepare() if prepare else None
            self.frozen = self.start.frozen()

            def init():
                read = self.start.weights() if weights is None else weights
                return init_state(model, self.optimizer, self.start.trained(read), self.run.key)

            def step_fn(state, number: int):
                state, metrics = program.step(state, program.arguments(self.frozen, number))
                return state, metrics if program.tokens is None else {**metrics, "tokens": program.tokens(number)}

            self.training = made.begin(init, abstract, step_fn)
            yield from self.training

    def drain(self, *arguments: Any, **more: Any) -> None:
        """Trains to the end. The arguments are those of `steps`."""
        for _ in self.steps(*arguments, **more):
            pass


def peak_flops(model: Model) -> float:
    """FLOP/s that the model's devices reach at most, 0 where unknown."""
    devices = jax.devices()[:1] if model.sharding is None else list(model.sharding.mesh.devices.flat)
    chip = chip_of(devices[0].device_kind)
    return 0.0 if chip is None else len(devices) * chip.flops(model.config.compute_dtype)
