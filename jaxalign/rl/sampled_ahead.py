"""Rollouts that are sampled one iteration before they are trained on (`config.ppo.sample_ahead`)."""

from __future__ import annotations

import dataclasses
import logging
import os
import zipfile
from pathlib import Path

import numpy as np

from jaxalign.records import Rollout


class AheadRollouts:
    """The next iteration's rollout, kept in memory and, for a resume, in a file.

    The weights that sampled it are gone after the update, so a resumed run cannot sample it again.

    Args:
      directory: the folder of the files; None keeps them in memory only.
      keep: the number of files to keep, at least as many as there are iterations between checkpoints.
      title: the name of the stage in messages.
    """

    def __init__(self, directory: Path | None, keep: int, title: str = "ppo"):
        self._directory, self._keep, self._title = directory, keep, title
        self._next: tuple[int, Rollout] | None = None

    def put(self, step: int, rollout: Rollout) -> None:
        """Keeps the rollout (numpy) of iteration `step`."""
        self._next = step, rollout
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(step)
        arrays = {name: value for name, value in vars(rollout).items() if value is not None}
        with open(f"{path}.tmp", "wb") as file:
            np.savez(file, **arrays)
        os.replace(f"{path}.tmp", path)
        for old in self._directory.glob("rollout-*.npz"):
            if int(old.stem.partition("-")[2]) <= step - self._keep:
                old.unlink(missing_ok=True)

    def take(self, step: int) -> Rollout | None:
        """The rollout (numpy) of iteration `step`; None if there is none, which is logged if there should be one."""
        kept, self._next = self._next, None
        if kept is not None and kept[0] == step:
            return kept[1]
        if self._directory is None or step == 0:
            return None
        names = {field.name for field in dataclasses.fields(Rollout)}
        try:
            with np.load(self._path(step)) as stored:
                return Rollout(**{name: stored[name] for name in stored.files if name in names})
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
            logging.getLogger("jaxalign").warning(
                "%s: %s, the responses that were sampled ahead for iteration %d, is missing or damaged; they are sampled "
                "again with newer weights, so the results differ from those of an uninterrupted run", self._title,
                self._path(step), step,
            )
            return None

    def close(self) -> None:
        """Deletes the files, which a finished run does not need."""
        if self._directory is not None and self._directory.exists():
            for path in self._directory.glob("rollout-*"):
                path.unlink(missing_ok=True)
            self._directory.rmdir()

    def _path(self, step: int) -> Path:
        return self._directory / f"rollout-{step:06d}.npz"
