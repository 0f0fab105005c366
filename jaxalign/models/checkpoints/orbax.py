"""Parameters in the Orbax layout: written atomically, and restored onto any mesh."""

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
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts

_FULL = {os.strerror(code): code for code in (errno.ENOSPC, errno.EDQUOT)}


def is_news(record: logging.LogRecord) -> bool:
    """A logging filter that drops records about a full disk: `full_disk` raises that error once, and every thread of Orbax
    would log it again."""
    text = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    return not any(words in text for words in _FULL)


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Raises an OSError with the system's error number if TensorStore reports a full disk."""
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
    gc.collect()  # Orbax's unfinished writers log when they are collected; let them do so before the error is shown.
    raise full


def save_params(directory: str | Path, params: Params) -> None:
    """Writes parameters atomically and returns when they are on disk. If the directory exists, it is left unchanged.

    Raises:
      OSError: the disk is full.
    """
    directory = Path(directory).absolute()
    if hosts.once(directory.exists):
        return
    with full_disk(directory), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, params)
    hosts.wait()


def load_params(directory: str | Path, model: Model, dtype: str = "float32") -> Params:
    """Loads the parameters of `model` in `dtype`, placed by its sharding rules.

    Raises:
      UserError: the parameters are missing, or do not fit the model.
    """
    directory = Path(directory).absolute()
    if not directory.exists():
        raise UserError(f"there are no parameters at {directory}; the stage that writes them has not finished")
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = []
        for tree in (checkpointer.metadata(directory).item_metadata.tree, model.abstract()):
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            shapes.append({jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves})
        stored, wanted = shapes
        for name in sorted(stored.keys() | wanted.keys()):
            there, expected = stored.get(name, "missing"), wanted.get(name, "missing")
            if there != expected:
                raise UserError(f"the parameters at {directory} do not fit config.model: {name} is {there} in the file "
                                f"and {expected} in the config")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), model.abstract())
        return checkpointer.restore(directory, abstract)
