"""Weights in Hugging Face layout: one `model.safetensors`, or shards with an index.

Files are read by memory map, block by block; what has been read is let go of, so that it does not count as the process's
memory.

Nothing is read before names and shapes are known to be right, so a mistake costs no time on a large checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxalign.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_LISTED = 8  # weights that an error message names; the rest is counted


class _Stored(NamedTuple):
    """One tensor of a file: its dtype as the format calls it, its shape, and where in the file it begins."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class _File:
    """One safetensors file by memory map."""

    def __init__(self, path: pathlib.Path):
        with safe_open(path, framework="numpy"):
            pass  # The library has checked the header, and that it and the file's length agree.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header.pop("__metadata__", None)
        self.tensors = {
            name: _Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }

    def read(self, name: str, window: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        stored, shape, begin = self.tensors[name]
        view = np.frombuffer(self._map, FLOATS[stored], math.prod(shape), begin).reshape(shape)
        with np.errstate(over="ignore"):
            value = np.array(view[window], dtype, order="C")
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        return value

    def close(self) -> None:
        self._map.close()


class Weights:
    """The named tensors of one folder. Use `open_weights`."""

    def __init__(self, folder: pathlib.Path, files: dict[str, _File]):
        """files: which open file holds each tensor."""
        self.folder = folder
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def dtype(self, name: str) -> str:
        """As the format calls it: "F32", "BF16" and so on."""
        return self._files[name].tensors[name].dtype

    def read(self, name: str, window: tuple[slice, ...] = (), dtype="float32") -> np.ndarray:
        """A block of the tensor, all of it by default, in another floating type.

        Raises:
          UserError: it holds numbers that are not finite, or that are not in `dtype`.
        """
        value = self._files[name].read(name, window, np.dtype(dtype))
        if not np.isfinite(value).all():
            wide = self._files[name].read(name, window, np.dtype("float64"))
            if np.isfinite(wide).all():
                raise UserError(f"{name} in {self.folder} holds numbers too large for {np.dtype(dtype)}; ask for another dtype")
            raise UserError(f"{name} in {self.folder} holds numbers that are not finite; get the weights again")
        return value

    def check(
        self, expected: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Raises UserError unless the folder holds just the `expected` names, of these shapes, in floating point.

        ignored: whether a name may be present and is not read.
        """
        problems = []
        if missing := sorted(set(expected) - self.names):
            problems.append(f"weights are missing: {_some(missing)}")
        if extra := sorted(name for name in self.names - set(expected) if not ignored(name)):
            problems.append(f"weights have no place in this model: {_some(extra)}")
        found = {name: self.shape(name) for name in sorted(self.names & set(expected))}
        if wrong := [f"{n} is {list(s)}, {list(expected[n])} expected" for n, s in found.items() if s != expected[n]]:
            problems.append(f"shapes do not match config.json: {_some(wrong)}")
        types = {name: self.dtype(name) for name in found}
        if odd := [f"{name} is {dtype}" for name, dtype in types.items() if dtype not in FLOATS]:
            problems.append(f"weights are not in one of {', '.join(FLOATS)}: {_some(odd)}")
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
            index = dict.fromkeys(opened[SINGLE].tensors, SINGLE)
        inside = {name: set(file.tensors) for name, file in opened.items()}
        if lost := sorted(name for name, file in index.items() if name not in inside[file]):
            raise UserError(f"{folder / INDEX} promises weights that its files do not hold: {_some(lost)}")
        if extra := sorted(f"{name} in {file}" for file in inside for name in inside[file] if index.get(name) != file):
            raise UserError(f"{folder / INDEX} does not name weights that its files hold: {_some(extra)}")
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
        valid = bool(index) and all(isinstance(n, str) and n != ".." and pathlib.PurePath(n).name == n for n in index.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of safetensors files ({error}); get it again") from error
    if not valid:
        raise UserError(f"{path} must map every weight to a file beside it; get it again")
    return index


def _open(path: pathlib.Path, stack: contextlib.ExitStack) -> _File:
    if not path.exists():
        raise UserError(f"{path} does not exist; a model folder needs {SINGLE}, or {INDEX} and every file it names")
    try:
        return stack.enter_context(contextlib.closing(_File(path)))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is cut short or no safetensors file ({error}); get it again") from error


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more
