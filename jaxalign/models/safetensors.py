"""Weights in Hugging Face layout: one `model.safetensors`, or shards with an index.

Files are read by memory map, one tensor at a time.

Nothing is read before names and shapes are known to be right, so a mistake costs no time on a large checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxalign.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_LISTED = 8  # weights that an error message names; the rest is counted


class Weights:
    """The named tensors of one folder. Use `open_weights`."""

    def __init__(self, folder: pathlib.Path, files: dict[str, object]):
        """files: which open safetensors file holds each tensor."""
        self.folder = folder
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32."""
        return self._files[name].get_tensor(name).astype(np.float32, copy=False)

    def check(
        self, expected: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Raises UserError unless the folder holds just the `expected` names, of these shapes, in floating point.

        ignored: tells names that may be there and are not read.
        """
        problems = []
        if missing := sorted(set(expected) - self.names):
            problems.append(f"weights are missing: {_some(missing)}")
        if extra := sorted(name for name in self.names - set(expected) if not ignored(name)):
            problems.append(f"weights have no place in this model: {_some(extra)}")
        found = {name: self.shape(name) for name in sorted(self.names & set(expected))}
        if wrong := [f"{n} is {list(s)}, {list(expected[n])} expected" for n, s in found.items() if s != expected[n]]:
            problems.append(f"shapes do not match config.json: {_some(wrong)}")
        types = {name: self._files[name].get_slice(name).get_dtype() for name in found}
        if odd := [f"{name} is {dtype}" for name, dtype in types.items() if dtype not in _FLOATS]:
            problems.append(f"weights are not in one of {', '.join(_FLOATS)}: {_some(odd)}")
        if problems:
            raise UserError(f"{self.folder} does not hold the model it should: {'; '.join(problems)}")


@contextlib.contextmanager
def open_weights(folder: str | pathlib.Path) -> Iterator[Weights]:
    """Opens the safetensors of a folder; they are closed with the block.

    Raises:
      UserError: the folder, a file or an indexed tensor is missing, or a file is cut short or no safetensors file.
    """
    folder = pathlib.Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"the model folder {folder} does not exist; give a folder with config.json and {SINGLE}")
    index = _read_index(folder)
    with contextlib.ExitStack() as stack:
        opened = {name: _open(folder / name, stack) for name in sorted(set(index.values()) or {SINGLE})}
        if not index:
            index = dict.fromkeys(opened[SINGLE].keys(), SINGLE)
        inside = {name: set(file.keys()) for name, file in opened.items()}
        if lost := sorted(name for name, file in index.items() if name not in inside[file]):
            raise UserError(f"{folder / INDEX} promises weights that its files do not hold: {_some(lost)}")
        yield Weights(folder, {name: opened[file] for name, file in index.items()})


def weight_files(folder: pathlib.Path) -> tuple[str, ...]:
    """Names of the files in a folder that its weights are read from: the one, or the index and every file it names.

    Raises:
      UserError: the index is damaged.
    """
    index = _read_index(folder)
    return (INDEX, *sorted(set(index.values()))) if index else (SINGLE,)


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """Tensor name to file name; empty for a single file."""
    path = folder / INDEX
    if (folder / SINGLE).exists() or not path.exists():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # A file name with a folder in it could point outside the checkpoint.
        valid = bool(index) and all(isinstance(n, str) and pathlib.PurePath(n).name == n for n in index.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of safetensors files ({error}); get it again") from error
    if not valid:
        raise UserError(f"{path} must map every weight to a file beside it; get it again")
    return index


def _open(path: pathlib.Path, stack: contextlib.ExitStack):
    if not path.exists():
        raise UserError(f"{path} does not exist; a model folder needs {SINGLE}, or {INDEX} and every file it names")
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is cut short or no safetensors file ({error}); get it again") from error


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more
