"""Parameters in the Orbax layout: written atomically, verified by checksums, and restored onto any mesh."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.checksums import checksums, damaged_arrays
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.storage import MOVED

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG, errno.ESTALE)
_LOST = ("NOT_FOUND", "No ArrayMetadata found", "params are missing", os.strerror(errno.ENOENT))
_RAISED = ("Handler Commit operations or the Commit callback in background save thread", "Save Finalize thread")
"""What a thread of Orbax logs of an exception that the main thread then raises."""
_UNREAD = ("was found in the checkpoint, but could not be restored",)
"""What Orbax logs if only the metadata of a checkpoint is read, as before each resume."""
_FAILURES = {os.strerror(code): code for code in _CODES}


def is_news(record: logging.LogRecord) -> bool:
    """A logging filter that drops records of errors that the main thread raises, as a full disk or an unwritable folder:
    `disk_errors` raises such an error once, and every thread of Orbax would log it again. It also drops those of metadata that
    is read without its arrays."""
    text = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    return not any(words in text for words in (*_FAILURES, *_LOST, *_RAISED, *_UNREAD))


def report_disk_errors_once() -> None:
    """Silences what the threads of Orbax and TensorStore print about an error that `disk_errors` raises."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _show_news


def _show_news(unraisable: Any) -> None:
    """A `sys.unraisablehook` that drops the exceptions of TensorStore's writes that end after Orbax has failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Raises an OSError with the system's error number if Orbax or TensorStore reports a full disk or an unwritable folder.

    Raises:
      UserError: the folder, or files in it, were moved or deleted.
    """
    try:
        yield
    except Exception as error:
        code = next((code for words, code in _FAILURES.items() if words in str(error)), None)
        if code is None:
            if isinstance(error, FileNotFoundError) or any(words in str(error) for words in _LOST):
                raise UserError(MOVED.format(folder=directory)) from None
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
    import orbax.checkpoint as ocp  # Large, so it is imported only where it is used.

    directory = Path(directory).absolute()
    if hosts.once(directory.exists):
        return
    report_disk_errors_once()
    with disk_errors(directory), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, params, custom_metadata={"checksums": checksums(params)})
    hosts.wait()


def load_params(directory: str | Path, model: Model, dtype: str = "float32") -> Params:
    """Loads the parameters of `model` in `dtype`, placed by its sharding rules.

    Reads them in their stored dtype, verifies their checksums, and then converts one array after another.

    Raises:
      UserError: the parameters are missing or damaged, or do not fit the model.
    """
    import orbax.checkpoint as ocp

    directory = Path(directory).absolute()
    if not os.path.exists(directory):  # Unlike Path.exists, False also for a name that is too long.
        raise UserError(f"there are no parameters at {directory}; the stage that writes them has not finished")
    with _damage(directory), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(directory)
        stored, wanted = _by_path(metadata.item_metadata.tree), _by_path(model.abstract())
        for name in sorted(stored.keys() | wanted.keys()):
            there, expected = (str(tuple(x[name].shape)) if name in x else "missing" for x in (stored, wanted))
            if there != expected:
                raise UserError(f"the parameters at {directory} do not fit config.model: {name} is {there} in the file "
                                f"and {expected} in the config")
        abstract = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.ShapeDtypeStruct(x.shape, stored[_name(path)].dtype, sharding=x.sharding), model.abstract()
        )
        params = checkpointer.restore(directory, abstract)
        wrong = damaged_arrays(params, (metadata.custom_metadata or {}).get("checksums"))
    if wrong:
        raise UserError(_DAMAGED.format(directory=directory, why=f"the checksum of {wrong[0]} does not match"))
    leaves, structure = jax.tree.flatten(params)
    del params
    for i, leaf in enumerate(leaves):
        leaves[i] = leaf.astype(dtype)
    return jax.tree.unflatten(structure, leaves)


_DAMAGED = ("the parameters at {directory} are damaged ({why}); restore that folder from a copy, or move the folder of its "
            "stage aside to run the stage again")


@contextlib.contextmanager
def _damage(directory: Path) -> Iterator[None]:
    """Raises the errors that Orbax and TensorStore raise for damaged files as one UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise UserError(_DAMAGED.format(directory=directory, why=first_line(error))) from None


_BUGS = (AttributeError, TypeError, KeyError, IndexError, AssertionError, RecursionError)


def first_line(error: Exception) -> str:
    """Why files cannot be read: the first line of an error's text, at most 200 characters of it. Text that speaks only of the
    code of Orbax, which takes every file to be whole, is replaced."""
    text = str(error).strip().partition("\n")[0][:200]
    return text if text and not isinstance(error, _BUGS) else "a file of it is incomplete, or is not one that was written here"


def _by_path(tree) -> dict:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
