"""Checkpoints by Orbax: asynchronous, atomic, restored onto any mesh."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import placed

_FULL = {os.strerror(code): code for code in (errno.ENOSPC, errno.EDQUOT)}


def _tells_more(record: logging.LogRecord) -> bool:
    """Whether a log says more than that the disk is full, which is raised and need not be told by each thread of Orbax."""
    told = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    return not any(words in told for words in _FULL)


@contextlib.contextmanager
def _full_disk(directory: Path) -> Iterator[None]:
    """What TensorStore says of a full disk is raised as the OSError that it is."""
    try:
        yield
    except Exception as error:
        code = next((code for words, code in _FULL.items() if words in str(error)), None)
        if code is None:
            raise
        full = OSError(code, os.strerror(code), str(directory))
        error.__traceback__ = None
    else:
        return
    gc.collect()  # What Orbax left half done says so now, and not after the sentence that matters.
    raise full


class Checkpointer:
    """Numbered checkpoints of one pytree; the newest two are kept. A checkpoint exists whole or not at all."""

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, cleanup_tmp_directories=True)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_tells_more)
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state) -> None:
        """Copies the state, then writes it in the background. Raises OSError, here or when that is waited for, where the disk
        is full."""
        with _full_disk(self._directory):
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract):
        """The newest checkpoint, as `abstract` (ShapeDtypeStructs, with shardings on a mesh).

        Without shardings Orbax would put arrays where they were saved from, and the devices of a mesh need not be here, or are
        not meant to be used now: `placed`.
        """
        return self._manager.restore(self.latest(), args=ocp.args.StandardRestore(placed(abstract)))

    def close(self) -> None:
        """Waits for what is being written. Raises OSError where the disk is full."""
        with _full_disk(self._directory):
            self._manager.wait_until_finished()
            self._manager.close()


def save_params(directory: Path, params) -> None:
    """Writes final parameters, whole or not at all; a complete earlier copy is left as it is. Returns when they are there.
    Raises OSError where the disk is full."""
    directory = Path(directory).absolute()
    if hosts.once(directory.exists):
        return
    with _full_disk(directory), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, params)
    hosts.wait()


def load_params(directory: Path, model: Model, dtype: str = "float32"):
    """Parameters of `model` in `dtype`, placed by its sharding rules. Raises UserError when they are missing or do not fit."""
    directory = Path(directory).absolute()
    if not directory.exists():
        raise UserError(f"no parameters at {directory}; the stage that writes them has not finished")
    with ocp.StandardCheckpointer() as checkpointer:
        found, wanted = _shapes(checkpointer.metadata(directory).item_metadata.tree), _shapes(model.abstract())
        for name in sorted(found.keys() | wanted.keys()):
            there, expected = found.get(name, "not there"), wanted.get(name, "not there")
            if there != expected:
                raise UserError(f"the parameters at {directory} do not fit config.model: {name} is {there} in the file "
                                f"and {expected} by the config")  # fmt: skip
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), model.abstract())
        return checkpointer.restore(directory, placed(abstract))


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


def copy_params(params):
    """A second set of buffers with the same values and placement, for a state that will be donated."""
    return jax.tree.map(lambda x: x.copy(), params)
