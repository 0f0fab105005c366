"""Checkpoints with Orbax: asynchronous, atomic, restorable onto any mesh."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxalign.models.checkpoints.orbax import full_disk, is_news, load_params, save_params

__all__ = ["Checkpointer", "copy_params", "load_params", "save_params"]


class Checkpointer:
    """Numbered checkpoints of one pytree, each written atomically. The newest two are kept."""

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, cleanup_tmp_directories=True)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(is_news)
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        """The number of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state) -> None:
        """Copies the state and writes it in the background. Raises OSError, here or in `close`, if the disk is full."""
        with full_disk(self._directory):
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract):
        """The newest checkpoint, with the shapes and shardings of `abstract`. Without shardings, Orbax would restore arrays to
        the devices that saved them, which may not exist here."""
        return self._manager.restore(self.latest(), args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Waits until the last checkpoint is written. Raises OSError if the disk is full."""
        with full_disk(self._directory):
            self._manager.wait_until_finished()
            self._manager.close()


def copy_params(params):
    """A copy with the same placement, for use in a state that a step will donate."""
    return jax.tree.map(lambda x: x.copy(), params)
