"""Checkpoints by Orbax: asynchronous, atomic, restored onto any mesh."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxalign.models.checkpoints.orbax import full_disk, is_news, load_params, save_params
from jaxalign.parallel.rows import placed

__all__ = ["Checkpointer", "copy_params", "load_params", "save_params"]


class Checkpointer:
    """Numbered checkpoints of one pytree; the newest two are kept. A checkpoint exists whole or not at all."""

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, cleanup_tmp_directories=True)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(is_news)
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state) -> None:
        """Copies the state, then writes it in the background. Raises OSError, here or when that is waited for, where the disk
        is full."""
        with full_disk(self._directory):
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract):
        """The newest checkpoint, as `abstract` (ShapeDtypeStructs, with shardings on a mesh).

        Without shardings Orbax would put arrays where they were saved from, and the devices of a mesh need not be here, or are
        not meant to be used now: `placed`.
        """
        return self._manager.restore(self.latest(), args=ocp.args.StandardRestore(placed(abstract)))

    def close(self) -> None:
        """Waits for what is being written. Raises OSError where the disk is full."""
        with full_disk(self._directory):
            self._manager.wait_until_finished()
            self._manager.close()


def copy_params(params):
    """A second set of buffers with the same values and placement, for a state that will be donated."""
    return jax.tree.map(lambda x: x.copy(), params)
