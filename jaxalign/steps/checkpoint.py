"""Checkpoints with Orbax: asynchronous, atomic, verified by checksums, restorable onto any mesh."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.checksums import checksums, damaged_arrays
from jaxalign.models.checkpoints.orbax import disk_errors, first_line, load_params, report_disk_errors_once, save_params
from jaxalign.parallel import hosts
from jaxalign.storage import MOVED, require_in_place

__all__ = ["Checkpointer", "copy_params", "load_params", "save_params"]


class Checkpointer:
    """Numbered checkpoints of one pytree, each written atomically. The newest two are kept.

    A checkpoint records the checksum of every array, its step and its run; `restore` verifies them.

    Args:
      directory: the folder of the checkpoints.
      run: identifies the run that writes them, such as a hash of its config; a checkpoint of another run is not restored.
    """

    def __init__(self, directory: Path, run: str = ""):
        import orbax.checkpoint as ocp  # Large, so it is imported only where it is used.

        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, cleanup_tmp_directories=True)
        report_disk_errors_once()
        self._directory, self._run = Path(directory).absolute(), run
        self._problems: dict[int, str] = {}
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Orbax reads the metadata of all checkpoints at once and fails if one is damaged.
            self._problems = {int(step): problem for step, problem in hosts.once(self._set_aside_unreadable).items()}
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._identity = _identity(self._directory)

    def latest(self) -> int | None:
        """The number of the newest checkpoint, intact or damaged; None if there is none."""
        return max([*self._problems, *self._manager.all_steps()], default=None)

    def save(self, step: int, state) -> None:
        """Copies the state and writes it in the background.

        Raises:
          OSError: here or in `close`, if the disk is full or the folder cannot be written.
          UserError: here or in `close`, if the folder was moved or deleted.
        """
        self._require_in_place()
        record = {"step": step, "run": self._run, "checksums": checksums(state)}
        with self._explained():
            self._manager.save(step, args=self._ocp.args.StandardSave(state), custom_metadata=record)

    def _require_in_place(self) -> None:
        """Raises UserError if the folder was moved or deleted, also if Orbax has then created it again."""
        require_in_place(self._directory)
        if _identity(self._directory) != self._identity:
            raise UserError(MOVED.format(folder=self._directory))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises the errors of the disk and of a moved folder instead of those that Orbax derives from them."""
        try:
            with disk_errors(self._directory):
                yield
        except (OSError, UserError):
            raise
        except Exception:
            self._require_in_place()
            raise

    def restore(self, abstract) -> tuple[int, Any]:
        """The step and the state of the newest intact checkpoint, with the shapes and shardings of `abstract`. Without
        shardings, Orbax would restore arrays to the devices that saved them, which may not exist here.

        Warns of each damaged checkpoint and renames it to "damaged-N", so that a new one can take its number.

        Raises:
          UserError: no checkpoint is intact, or the newest is one of another run.
        """
        problems = dict(self._problems)
        for step in sorted(self._manager.all_steps(), reverse=True):
            state, problems[step] = self._read(step, abstract)
            if not problems[step]:
                break
        else:
            if not problems:
                raise UserError(f"there is no checkpoint in {self._directory}")
            raise UserError(f"no checkpoint in {self._directory} can be used: {_listed(problems)}; move that folder aside to "
                            "begin the training again")
        del problems[step]
        if problems:
            if hosts.is_first():
                logging.getLogger("jaxalign").warning(
                    f"{_listed(problems)}; training resumes from checkpoint {step} in {self._directory}"
                )
            hosts.once(lambda: [self._set_aside(damaged) for damaged in problems])
            self._manager.reload()
        return step, state

    def _set_aside_unreadable(self) -> dict[str, str]:
        """Sets the checkpoints aside whose metadata cannot be read, and returns the problem of each by its number."""
        problems = {}
        with self._ocp.StandardCheckpointer() as checkpointer:
            for folder in self._directory.glob("[0-9]*"):
                if not folder.name.isdigit():  # Orbax removes unfinished checkpoints.
                    continue
                try:
                    checkpointer.metadata(folder)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    problems[folder.name] = f"its metadata cannot be read: {first_line(error)}"
                    self._set_aside(int(folder.name))
        return problems

    def _set_aside(self, step: int) -> None:
        """Renames a checkpoint, if it still has its number."""
        folder, aside = self._directory / str(step), self._directory / f"damaged-{step}"
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)

    def _read(self, step: int, abstract) -> tuple[Any, str]:
        """(state, ""), or (None, the problem) for a damaged checkpoint."""
        try:
            record = self._manager.metadata(step).custom_metadata or {}
            state = self._manager.restore(step, args=self._ocp.args.StandardRestore(abstract))
        except Exception as error:
            if hosts.count() > 1 or isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise  # The other processes may have read it.
            return None, first_line(error)
        wrong = damaged_arrays(state, record.get("checksums"))
        if wrong:
            return None, f"the checksum of {wrong[0]} does not match"
        if record.get("step") != step:
            return None, f"it is checkpoint {record.get('step')}, renamed"
        if record.get("run") != self._run:
            raise UserError(f"checkpoint {step} in {self._directory} was written by another stage or with another config; move "
                            "that folder aside to begin the training again")
        return state, ""

    def close(self) -> None:
        """Waits until the last checkpoint is written. Raises the errors of `save`."""
        with self._explained():
            self._manager.wait_until_finished()
            self._manager.close()
        self._require_in_place()


def _identity(folder: Path) -> tuple[int, int] | None:
    """The device and the number of a folder; None if it does not exist."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _listed(problems: dict[int, str]) -> str:
    return "; ".join(f"checkpoint {step} cannot be used ({problem})" for step, problem in problems.items())


def copy_params(params):
    """A copy with the same placement, for use in a state that a step will donate."""
    return jax.tree.map(lambda x: x.copy(), params)
