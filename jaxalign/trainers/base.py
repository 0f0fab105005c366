"""The public interface of every trainer: its arguments, its directory and its newest weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxalign.config import section_from
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.storage import write_atomically
from jaxalign.tracking.timing import Timing
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.fitting import Fit, RunSettings, peak_flops
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.loop import Loop, Step

__all__ = ["PolicyTrainer", "Step", "Trainer", "fingerprint", "section_from"]


class Trainer:
    """The base class of trainers: a model, settings, and optionally a directory.

    With a directory, a trainer writes metrics.jsonl, timing.jsonl and checkpoints. After an interruption, the same call of
    `fit` resumes and produces bit-identical results.

    Args:
      model: the language model to start from; it is not changed.
      section: the trainer's settings, a config section.
      name: the trainer's name in error messages.
      directory: for metrics and checkpoints; None keeps everything in memory.
      seed: the seed of all randomness.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.

    Raises:
      UserError: an argument has the wrong type.
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
        """The settings of the run, whose loop writes to the trainer's directory, if any."""
        return RunSettings(self._seed, key, self._loop, self._directory, self._timing if self._directory else None)

    def _timing(self) -> Timing:
        return Timing(self._directory / "timing.jsonl", peak_flops(self._start.model))

    def _loop(self, total_steps: int, checkpoint_every: int, **fields: Any) -> Loop:
        settings = {"seed": self._seed} | dataclasses.asdict(self.section)
        alike = {"stage": self.name, "directory": self._directory, "progress": self._progress}
        alike |= {"trackers": self._trackers, "settings": settings, "peak": peak_flops(self._start.model)}
        return Loop(total_steps=total_steps, checkpoint_every=checkpoint_every, **(alike | fields))

    def _claim(self, data: Any) -> None:
        """Records the run's settings and a hash of its data in the directory, or checks them against an earlier record.

        Raises:
          UserError: the directory contains a run with different settings or data.
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
            raise UserError(f"{self.name}(directory) is {str(self._directory)!r}, which contains a run with different "
                            f"{' and '.join(differs) or 'settings'}; give the same values to resume it, or another directory")

    @property
    def state(self) -> Any:
        """The newest training state. Raises UserError before the first step."""
        if self._fit is None or self._fit.training is None or self._fit.training.state is None:
            raise UserError(f"{self.name} has not trained yet; iterate over {self.name}.fit(...) first")
        return self._fit.training.state

    def _trained(self) -> Params:
        """The newest trained parameters. They are copied while training runs, since the next step donates them."""
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
    """A trainer that produces a language model."""

    @property
    def policy(self) -> LanguageModel:
        """The language model with the newest weights. Raises UserError before the first step."""
        return self._start.with_params(self._trained())

    def save(self, folder: str | Path, **options: Any) -> None:
        """Writes the policy in Hugging Face's layout. `options` are passed to `LanguageModel.save`."""
        self.policy.save(folder, **options)
