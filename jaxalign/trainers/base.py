"""The base of every trainer: its inputs, its jitted step, its loop, its directory and its newest weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxalign.config import section_from
from jaxalign.config.arguments import SEED, as_path, instance_of, make_folder
from jaxalign.config.schema import checked
from jaxalign.data.loader import EpochLoader, take
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.planner.hardware import chip_of
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, ScoredPairs
from jaxalign.rl.checks import Check
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.early_stopping import EarlyStopping, StoppingState
from jaxalign.steps.loop import Loop, Step, Training
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import TrainState, abstract_state, init_state
from jaxalign.steps.work import learning_packed, learning_pairs
from jaxalign.storage import write_atomically
from jaxalign.tracking.tracker import Tracker

__all__ = ["PolicyTrainer", "Step", "Trainer", "TrainerInputs", "fingerprint", "model_inputs", "section_from"]

CHECKS = "checks.json"
"""The file with the step-0 checks of a run."""

Frozen = Params | None


@dataclasses.dataclass(frozen=True)
class TrainerInputs:
    """A model, functions that read its weights while programs compile, and the seeds and the loop of its training.

    `model_inputs` makes them from a language model in memory, `stages/shared/training.py` from a work directory.

    Attributes:
      model: the architecture to train.
      weights: reads the weights that training starts from; with adapters, joined with the base. A reference may also use them.
      trained: takes those weights and returns the part to train, in buffers that training may donate.
      frozen: reads the base under the adapters; returns None without adapters.
      seed: seeds the order of the rows.
      key: the PRNG key of the training state.
      root_key: the PRNG key from which the keys of other uses are folded.
      loop: the settings of the loop; the trainer sets its steps and the metrics that it shows.
      abstract_frozen: the base under the adapters as ShapeDtypeStructs.
      language_model: the language model that a trainer of the public API starts from; None in a stage.
    """

    model: Model
    weights: Callable[[], Params]
    trained: Callable[[Params], Params]
    frozen: Callable[[], Frozen]
    seed: int
    key: jax.Array
    root_key: jax.Array
    loop: Loop
    abstract_frozen: Frozen = None
    language_model: LanguageModel | None = None


def model_inputs(
    model: LanguageModel,
    section: Any,
    name: str,
    *,
    directory: str | Path | None = None,
    seed: int = 0,
    trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
    progress: bool = False,
    argument: str = "model",
) -> TrainerInputs:
    """The inputs of a trainer that starts from a language model, whose own weights are not changed.

    Args:
      model: the language model.
      section: the trainer's settings, a config section.
      name: the trainer's name in error messages and on the progress bar.
      directory: for metrics and checkpoints; None keeps everything in memory.
      seed: the seed of all randomness.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      argument: the name of the argument with the language model.

    Raises:
      UserError: an argument has the wrong type or value.
    """
    instance_of(model, LanguageModel, f"{name}({argument})", "a LanguageModel, as load_model returns it,")
    seed = checked(seed, int, f"{name}(seed)", SEED)
    loop = Loop(
        stage=name, directory=None if directory is None else as_path(directory, f"{name}(directory)", written=True),
        trackers=_as_trackers(trackers, f"{name}(trackers)"), progress=checked(progress, bool, f"{name}(progress)"),
        peak=peak_flops(model.model), settings={"seed": seed} | dataclasses.asdict(section),
    )
    return TrainerInputs(
        model.model,
        weights=lambda: model.weights,
        trained=lambda _: copy_params(model.params),
        frozen=lambda: model.frozen,
        seed=seed,
        key=jax.random.key(seed),
        root_key=jax.random.key(seed),
        loop=loop,
        abstract_frozen=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.frozen),
        language_model=model,
    )


def _as_trackers(trackers: Any, name: str) -> Mapping[str, Tracker] | Sequence[Tracker]:
    """The trackers. Raises UserError unless they are a sequence of trackers or a mapping from names to trackers."""
    trackers, one = () if trackers is None else trackers, "an object with the methods start, log and finish"
    instance_of(trackers, Mapping | Sequence, name, "a list of trackers, or a mapping from names to trackers,")
    named = trackers if isinstance(trackers, Mapping) else {str(i): tracker for i, tracker in enumerate(trackers)}
    for key, tracker in named.items():
        instance_of(key, str, f"a key of {name}", "a string")
        if isinstance(tracker, type):
            raise UserError(f"{name}[{key}] is the class {tracker.__name__}; {one} is expected: give an instance")
        instance_of(tracker, Tracker, f"{name}[{key}]", one)
    return trackers


class Trainer:
    """The base class of trainers: one training run.

    With a directory, a trainer writes metrics.jsonl, timing.jsonl and checkpoints. After an interruption, the same call of
    `fit` resumes and produces bit-identical results. A stage makes a trainer with `from_inputs` and calls the method of it
    that takes prepared arrays.

    Args:
      inputs: the model, its weights, the seeds and the loop.
      section: the trainer's settings, a config section.

    Attributes:
      name: the trainer's name in error messages.
      training: the running loop, whose `state` is the newest state; None before it begins.
      frozen: the base under the adapters, once it has been read.
      optimizer: the optimizer of the run, once training has begun.
      cut: the number of the rows given to `fit` that lost tokens to the section's row_length or max_length.
      stopping: the early stopping of the run; None without it. The state of `training` is then a `StoppingState`.
    """

    name: ClassVar[str]
    training: Training | None = None
    frozen: Frozen = None
    cut: int = 0
    stopping: EarlyStopping | None = None

    def __init__(self, inputs: TrainerInputs, section: Any):
        self.inputs, self.section = inputs, section

    @classmethod
    def from_inputs(cls, inputs: TrainerInputs, section: Any) -> Self:
        """A trainer whose weights are read while its programs compile. section: a valid config section."""
        trainer = cls.__new__(cls)
        Trainer.__init__(trainer, inputs, section)
        return trainer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the language model."""
        return self.inputs.language_model.tokenizer

    @property
    def state(self) -> Any:
        """The newest training state. Raises UserError before the first step."""
        state = None if self.training is None else self.training.state
        if state is None:
            raise UserError(f"{self.name} has not trained yet; iterate over {self.name}.fit(...) first")
        return state if self.stopping is None else state.train

    @property
    def params(self) -> Params:
        """The trained parameters: the newest ones, which the next step donates, or the best ones with early stopping."""
        return self.state.params if self.stopping is None else self.training.state.best_params

    @property
    def weights(self) -> Params:
        """The trained parameters; with adapters, joined with the base."""
        return join(self.frozen, self.params)

    def _train(
        self,
        step: Callable,
        arguments: Callable[[Frozen, np.ndarray], Any],
        rows: PackedBatch | AnswerPairs | PairBatch | ScoredPairs,
        loader: EpochLoader,
        *,
        total_steps: int | None = None,
        shown: tuple[str, ...] = ("loss",),
        prepare: Callable[[], Params] | None = None,
        stopping: EarlyStopping | None = None,
    ) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          step: the jitted step `(state, arguments) -> (state, metrics)`, whose metrics are one of the records in
            `steps.metrics`. It compiles while weights are read.
          arguments: `arguments(frozen, index) -> record`: the batch of rows `index` and every other argument but the state.
          rows: all rows, numpy arrays.
          loader: selects the rows of each batch.
          total_steps: the number of steps; None for the section's number of epochs.
          shown: the metrics that the progress bar shows.
          prepare: does the work that must precede the first step and returns the starting weights. If None, the starting
            weights are read only if there is no checkpoint.
          stopping: ends training early; None trains all steps.
        """
        inputs, model, section, self.stopping = self.inputs, self.inputs.model, self.section, stopping
        total_steps = loader.steps(section.epochs) if total_steps is None else total_steps
        self.optimizer = optimizer = make_optimizer(section.optimizer, total_steps)
        abstract = abstract_state(model, optimizer)
        learning = learning_packed if isinstance(rows, PackedBatch) else learning_pairs
        loop = dataclasses.replace(
            inputs.loop, total_steps=total_steps, checkpoint_every=section.checkpoint_every, shown=shown,
            flops=lambda number: learning(model, take(rows, loader.indices(number))),
        )
        with Ahead() as ahead:
            ahead.add(step, lambda: (abstract, arguments(inputs.abstract_frozen, loader.indices(0))))
            weights = prepare() if prepare else None
            self.frozen = inputs.frozen()

            def init():
                start = inputs.weights() if weights is None else weights
                state = init_state(model, optimizer, inputs.trained(start), inputs.key)
                return state if stopping is None else stopping.begin(state)

            def train_step(state: TrainState, number: int):
                index = loader.indices(number)
                state, metrics = step(state, arguments(self.frozen, index))
                if not isinstance(rows, PackedBatch):  # The step counts the tokens of packed rows.
                    metrics = dataclasses.replace(metrics, tokens=int(rows.length[index].sum()))
                return state, metrics

            def stopping_step(state: StoppingState, number: int):
                train, metrics = train_step(state.train, number)
                state, completed = dataclasses.replace(state, train=train), number + 1
                if not stopping.evaluates(completed, total_steps):
                    return state, metrics
                state, held_out = stopping.update(state, completed)
                return state, {"training": metrics} | held_out

            if stopping is None:
                self.training = loop.begin(init, abstract, train_step)
            else:
                loop = dataclasses.replace(
                    loop, stop=lambda state, completed: stopping.evaluates(completed, total_steps) and stopping.ends(state)
                )
                self.training = loop.begin(init, stopping.abstract(abstract), stopping_step)
            yield from self.training

    def _write_checks(self, checks: Sequence[Check]) -> None:
        """Writes the step-0 checks to the directory, if any."""
        directory = self.inputs.loop.directory
        if directory is not None:
            text = json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n"
            hosts.once(lambda: write_atomically(directory / CHECKS, text))

    def _claim(self, data: Any) -> None:
        """Records the run's settings and a hash of its data in the directory, or checks them against an earlier record.

        Raises:
          UserError: the directory contains a run with different settings or data.
        """
        directory = self.inputs.loop.directory
        if directory is None:
            return
        described = {"trainer": self.name, "seed": self.inputs.seed, "settings": dataclasses.asdict(self.section)}
        described["data"] = fingerprint(data)
        text, path = json.dumps(described, indent=2, default=str) + "\n", directory / "trainer.json"
        try:
            recorded = hosts.once(lambda: path.read_text(encoding="utf-8") if path.exists() else None)
            old = {} if recorded is None else dict(parse_json(recorded))
        except (OSError, TypeError, ValueError) as error:
            raise UserError(f"{self.name}(directory) is {str(directory)!r}, whose trainer.json cannot be read ({error}); give "
                            "another directory") from None
        if recorded is None:
            hosts.once(lambda: make_folder(directory, f"{self.name}(directory)"))
            hosts.once(lambda: write_atomically(path, text))
        elif recorded != text:
            new = parse_json(text)
            differs = [name for name in new if old.get(name) != new[name]]
            raise UserError(f"{self.name}(directory) is {str(directory)!r}, which contains a run with different "
                            f"{' and '.join(differs) or 'settings'}; give the same values to resume it, or another directory")


class PolicyTrainer(Trainer):
    """A trainer that produces a language model."""

    @property
    def policy(self) -> LanguageModel:
        """The language model with the newest weights. Raises UserError before the first step.

        The weights are copied while training runs, since the next step donates them.
        """
        params = self.params
        return self.inputs.language_model.with_params(copy_params(params) if self.training.running else params)

    def save(self, folder: str | Path, **options: Any) -> None:
        """Writes the policy in Hugging Face's layout. `options` are passed to `LanguageModel.save`."""
        self.policy.save(folder, **options)


def fingerprint(data: Any) -> str:
    """A hash of a pytree of numpy arrays, by their content."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


def peak_flops(model: Model) -> float:
    """The peak FLOP/s of all of the model's devices together; 0 if unknown."""
    devices = model.sharding.mesh.devices
    chip = chip_of(devices.flat[0].device_kind)
    return 0.0 if chip is None else devices.size * chip.flops(model.config.compute_dtype)
