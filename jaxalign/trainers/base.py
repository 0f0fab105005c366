"""The base of every trainer: its jitted step, its loop, its directory and its newest weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxalign.config import PretrainConfig
from jaxalign.config.arguments import make_folder
from jaxalign.config.constraints import at_least
from jaxalign.config.results import setting_changes
from jaxalign.config.schema import checked
from jaxalign.data.loader import EpochLoader, InOrder, RowsOnDemand, take
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.models.adapters.lora import join
from jaxalign.models.checkpoints.checksums import checksums
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, ScoredPairs
from jaxalign.rl.checks import Check
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.early_stopping import EarlyStopping, StoppingState
from jaxalign.steps.loop import Step, Training
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import TrainState, abstract_state, init_state
from jaxalign.steps.work import learning_packed, learning_pairs
from jaxalign.storage import write_atomically
from jaxalign.trainers.extent import rate_warning, rows_warning, schedule_warning, warn_of_extent
from jaxalign.trainers.inputs import Frozen, TrainerInputs

CHECKS = "checks.json"
"""The file with the step-0 checks of a run."""

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
      stopping: measures the held-out rows of the run; None without them. With its patience, the state of `training` is a
        `StoppingState`.
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
        return state.train if isinstance(state, StoppingState) else state

    @property
    def params(self) -> Params:
        """The trained parameters: the newest ones, which the next step donates, or the best ones with early stopping."""
        state = self.state if self.stopping is None or self.stopping.patience is None else self.training.state
        return state.best_params if isinstance(state, StoppingState) else self._trained_params(state)

    def _trained_params(self, state: Any) -> Params:
        return state.params

    def measure_held_out(self) -> dict[str, float]:
        """The metrics of the held-out rows with the weights of `params`: the best with early stopping, otherwise the newest.

        Raises:
          UserError: `fit` was given no held-out rows, or training has not begun.
        """
        if self.stopping is None:
            raise UserError(f"{self.name} has no held-out rows to measure; give {self.name}.fit the argument held_out, and "
                            "iterate over it")
        params, state = self.params, self.training.state
        return dict(self.stopping.measure(
            params, int(fetch(state.best_step)) if isinstance(state, StoppingState) else self.training.completed
        ))

    def _held_out(
        self, held_out: Any, eval_every: int, patience: int | None, measure: Callable, steps_per_epoch: int, **options: Any
    ) -> EarlyStopping | None:
        """The evaluation that the arguments of `fit` describe; None without held-out rows.

        Args:
          held_out, eval_every, patience: the arguments of `fit`.
          measure, options: see `EarlyStopping`.
          steps_per_epoch: the steps between evaluations if `eval_every` is 0.
        """
        every = checked(eval_every, int, f"{self.name}.fit(eval_every)", at_least(0))
        patience = checked(patience, int | None, f"{self.name}.fit(patience)", at_least(1))
        if held_out is None and (every or patience is not None):
            given = f"eval_every) is {every}" if every else f"patience) is {patience}"
            raise UserError(f"{self.name}.fit({given}, but there are no rows to measure; give the argument held_out too")
        return None if held_out is None else EarlyStopping(every or steps_per_epoch, patience, measure, **options)

    @property
    def weights(self) -> Params:
        """The trained parameters; with adapters, joined with the base."""
        return join(self.frozen, self.params)

    def _train(
        self,
        step: Callable,
        arguments: Callable[[Frozen, np.ndarray], Any],
        rows: PackedBatch | RowsOnDemand | AnswerPairs | PairBatch | ScoredPairs,
        loader: EpochLoader | InOrder,
        *,
        total_steps: int | None = None,
        shown: tuple[str, ...] = ("loss",),
        prepare: Callable[[], Params] | None = None,
        stopping: EarlyStopping | None = None, custom: bool = False,
    ) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          step: the jitted step `(state, arguments) -> (state, metrics)`, whose metrics are one of the records in
            `steps.metrics`. It compiles while weights are read.
          arguments: `arguments(frozen, index) -> record`: the batch of rows `index` and every other argument but the state.
          rows: all rows, numpy arrays; or rows on demand.
          loader: selects the rows of each batch.
          total_steps: the number of steps; None for the section's number of epochs.
          shown: the metrics that the progress bar shows.
          prepare: does the work that must precede the first step and returns the starting weights. If None, the starting
            weights are read only if there is no checkpoint.
          stopping: measures held-out rows, and may end training early; None trains all steps.
          custom: whether the step calls a function of the user's (`make_optimizer`).
        """
        inputs, model, section, self.stopping = self.inputs, self.inputs.model, self.section, stopping
        total_steps = loader.steps(section.epochs) if total_steps is None else total_steps
        self.optimizer = optimizer = make_optimizer(section.optimizer, total_steps, custom)
        warn_of_extent(inputs.loop.stage, rows_warning(loader, total_steps), schedule_warning(section.optimizer, total_steps),
                       None if isinstance(section, PretrainConfig) else rate_warning(section.optimizer, model))
        abstract = abstract_state(model, optimizer)
        is_packed = (rows.kind if isinstance(rows, RowsOnDemand) else type(rows)) is PackedBatch
        learning = learning_packed if is_packed else learning_pairs
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
                return init_state(model, optimizer, inputs.trained(start), inputs.key)

            def lengths(index: np.ndarray) -> np.ndarray:
                return take(rows, index).length if isinstance(rows, RowsOnDemand) else rows.length[index]

            def train_step(state: TrainState, number: int):
                index = loader.indices(number)
                state, metrics = step(state, arguments(self.frozen, index))
                if not is_packed:  # The step counts the tokens of packed rows.
                    metrics = dataclasses.replace(metrics, tokens=int(lengths(index).sum()))
                return state, metrics

            begin = loop.begin if stopping is None else functools.partial(stopping.begin, loop)
            self.training = begin(init, abstract, train_step)
            yield from self.training

    def _write_checks(self, checks: Sequence[Check]) -> None:
        """Writes the step-0 checks to the directory, if any."""
        directory = self.inputs.loop.directory
        if directory is not None:
            text = json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n"
            hosts.once(lambda: write_atomically(directory / CHECKS, text))

    def _claim(self, data: Any, **options: Any) -> None:
        """Records the run's settings and hashes of its model and its data in the directory, or checks them against an earlier
        record.

        Args:
          data: a pytree of numpy arrays.
          options: arguments of `fit` by name; those that are 0 or None are not recorded.

        Raises:
          UserError: the directory contains a run with different settings, another model or different data.
        """
        directory = self.inputs.loop.directory
        if directory is None:
            return
        settings = {name: value for name, value in self.inputs.loop.settings.items() if name != "seed"}
        described = {"trainer": self.name, "seed": self.inputs.seed, "settings": settings}
        described |= {"model": _model_hash(self.inputs.language_model), "data": fingerprint(data)}
        described |= {name: value for name, value in options.items() if value}
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
            changed = setting_changes(old.get("settings") or {}, new["settings"])
            differs = [name for name in new if name != "settings" and old.get(name) != new[name]]
            differs += [f"settings ({', '.join(changed)})"] if changed else []
            if differs:
                raise UserError(f"{self.name}(directory) is {str(directory)!r}, which contains a run with different "
                                f"{' and '.join(differs)}; give the same values to resume it, or another directory")


def _model_hash(model: LanguageModel) -> str:
    """A hash of the weights. Of adapters it reads only the matrix `b`, which is 0 in new ones: the other arrays of new adapters
    are computed, and another kind of device may round them differently. (So may it the scales of a quantised base, which are
    read.)"""
    sums = checksums((model.params, model.frozen))
    read = {path: value for path, value in sums.items() if "adapters" not in path.split(".") or path.endswith(".b")}
    return hashlib.sha256(json.dumps(read).encode("utf-8")).hexdigest()[:32]


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
