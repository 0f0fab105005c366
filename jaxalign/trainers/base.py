"""What every trainer shares: where its weights come from, how its loop is made, and the public part of a trainer object."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxalign.config import schema
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import placed
from jaxalign.planner.hardware import chip_of
from jaxalign.storage import write_atomically
from jaxalign.tracking.timing import Timing
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.rows import as_examples, as_judgements, as_pairs, as_prompts, require_equal_lengths
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.loop import Loop, Step, Training
from jaxalign.training.state import abstract_state, init_state

__all__ = [
    "Fit",
    "PolicyTrainer",
    "Program",
    "RunSettings",
    "Start",
    "Step",
    "Trainer",
    "as_examples",
    "as_judgements",
    "as_pairs",
    "as_prompts",
    "require_equal_lengths",
    "section_from",
    "start_of",
]

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
    """What a run of a trainer has beside its model, its data and its config section.

    Attributes:
      seed: of the order of the rows.
      key: the PRNG key of the training state.
      loop: `loop(total_steps, checkpoint_every, **fields) -> Loop`, with the directory and the trackers of the run.
      directory: where the run writes; None for a run in memory.
      timing: `timing() -> Timing` of work beside the loop; None where nothing is timed.
    """

    seed: int
    key: jax.Array
    loop: Callable[..., Loop]
    directory: Path | None = None
    timing: Callable[[], Timing] | None = None

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Times work beside the loop; yields an object with the fields tokens and flops."""
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


def section_from(default: Any, fields: Mapping[str, Any], name: str) -> Any:
    """A config section from keyword arguments; fields that are not given keep the values of `default`.

    Args:
      default: the section.
      fields: values by field name. A section inside is a mapping, or an object of its class.
      name: the trainer's name in error messages.

    Raises:
      UserError: there is no such field, or its value is not accepted.
    """
    plain = {key: dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for key, x in fields.items()}
    return schema.from_mapping(default, plain, name)


class Trainer:
    """The public part of a trainer: a model, settings, and optionally a directory.

    With a directory a trainer writes metrics.jsonl, timing.jsonl and checkpoints, and the same call of `fit` after an
    interruption resumes and ends with the same bits.

    Args:
      model: the language model to start from; it is not changed.
      section: the trainer's settings, a config section.
      name: the trainer's name in error messages.
      directory: for metrics and checkpoints; None keeps everything in memory.
      seed: of all randomness.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.

    Raises:
      UserError: an argument is of another type.
    """

    def __init__(
        self,
        model: LanguageModel,
        section: Any,
        name: str,
        *,
        directory: str | Path | None = None,
        seed: int = 0,
        trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
        progress: bool = False,
    ):
        if not isinstance(model, LanguageModel):
            raise UserError(f"{name}(model) is of type {type(model).__name__}; a LanguageModel, as load_model returns it, is "
                            "expected")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UserError(f"{name}(seed) is {seed!r}; a whole number of at least 0 is expected")
        self.section, self.name = section, name
        self._start, self._directory, self._seed = model, None if directory is None else Path(directory).expanduser(), seed
        self._trackers, self._progress = trackers, progress
        self._fit: Fit | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._start.tokenizer

    def _settings(self, key: jax.Array) -> RunSettings:
        """The run's settings: its own loop in `directory` or in memory."""
        return RunSettings(self._seed, key, self._loop, self._directory, self._timing if self._directory else None)

    def _timing(self) -> Timing:
        return Timing(self._directory / "timing.jsonl", peak_flops(self._start.model))

    def _loop(self, total_steps: int, checkpoint_every: int, **fields: Any) -> Loop:
        settings = {"seed": self._seed} | dataclasses.asdict(self.section)
        alike = {"trackers": self._trackers, "settings": settings, "progress": self._progress}
        alike["peak"] = peak_flops(self._start.model)
        return Loop(self.name, self._directory, total_steps, checkpoint_every, **(alike | fields))

    def _claim(self, data: Any) -> None:
        """Records in the directory which run it holds, by settings and data, or checks that it holds this one.

        Raises:
          UserError: it holds a run with other settings or other data.
        """
        if self._directory is None:
            return
        described = {"trainer": self.name, "seed": self._seed, "settings": dataclasses.asdict(self.section)}
        described["data"] = fingerprint(data)
        text, path = json.dumps(described, indent=2, default=str) + "\n", self._directory / "trainer.json"
        found = hosts.once(lambda: path.read_text(encoding="utf-8") if path.exists() else None)
        if found is None:
            hosts.once(lambda: self._directory.mkdir(parents=True, exist_ok=True))
            hosts.once(lambda: write_atomically(path, text))
        elif found != text:
            old, new = json.loads(found), json.loads(text)
            differs = [name for name in new if old.get(name) != new[name]]
            raise UserError(f"{self.name}(directory) is {str(self._directory)!r}, which holds a run with other "
                            f"{' and '.join(differs) or 'settings'}; give the same ones to resume it, or another directory")

    @property
    def state(self) -> Any:
        """The newest training state. Raises UserError before the first step."""
        if self._fit is None or self._fit.training is None or self._fit.training.state is None:
            raise UserError(f"{self.name} has not trained yet; iterate over {self.name}.fit(...) first")
        return self._fit.training.state

    def _trained(self) -> Params:
        """The newest trained parameters, copied while training runs, since its next step donates them."""
        params = self.state.params
        return copy_params(params) if self._fit.training.running else params


def fingerprint(data: Any) -> str:
    """A hash of a pytree of numpy arrays, by their content."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


class PolicyTrainer(Trainer):
    """A trainer whose result is a language model."""

    @property
    def policy(self) -> LanguageModel:
        """The language model with the newest weights. Raises UserError before the first step."""
        return self._start.with_params(self._trained())

    def save(self, folder: str | Path, **options: Any) -> None:
        """Writes the policy in Hugging Face's layout. `options` are those of `LanguageModel.save`."""
        self.policy.save(folder, **options)
