"""Reads and writes weights in the Hugging Face layout: one `model.safetensors`, or shards with an index.

Files are memory-mapped and read block by block; pages are released after reading, so that they do not count as the process's
memory. Names and shapes are checked before any weight is read, so a mistake is reported immediately even for a large model.
Files are written tensor by tensor, with the file names of `transformers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxalign.errors import UserError, shown
from jaxalign.json_text import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
DTYPES = {np.dtype(kind).name: name for name, kind in FLOATS.items() if name != "F64"}
_LISTED = 8  # The maximum number of weights that an error message lists; it counts the rest.


class _Stored(NamedTuple):
    """One tensor of a file: its dtype's name in the format, its shape, and its offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class _File:
    """One memory-mapped safetensors file."""

    def __init__(self, path: pathlib.Path):
        with safe_open(path, framework="numpy"):
            pass  # Opening the file lets the library check the header against the file's length.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
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


@dataclasses.dataclass(frozen=True)
class Weights:
    """The named tensors of one folder. Use `open_weights`. files: the open file of each tensor, and its name in that file."""

    folder: pathlib.Path
    files: dict[str, tuple[_File, str]]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.files)

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """Only the tensors whose present names are the values of `names`, by the keys."""
        return Weights(self.folder, {new: self.files[name] for new, name in names.items()})

    def _stored(self, name: str) -> _Stored:
        file, stored = self.files[name]
        return file.tensors[stored]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype of the tensor in its file, after `check`."""
        return np.dtype(FLOATS[self._stored(name).dtype])

    def read(self, name: str, window: tuple[slice, ...] = (), dtype="float32") -> np.ndarray:
        """Reads a block of the tensor (by default all of it) and converts it to `dtype`, a floating-point type.

        Raises:
          UserError: the block contains numbers that are not finite, or too large for `dtype`.
        """
        file, stored = self.files[name]
        value = file.read(stored, window, np.dtype(dtype))
        if not np.isfinite(value).all():
            wide = file.read(stored, window, np.dtype("float64"))
            if np.isfinite(wide).all():
                raise UserError(f"{name} in {self.folder} contains numbers too large for {np.dtype(dtype)}; choose another "
                                "dtype")
            raise UserError(f"{name} in {self.folder} contains non-finite numbers; download or copy the weights again")
        return value

    def check(
        self, expected: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Raises UserError unless the folder has exactly the `expected` names, with these shapes and floating-point types.

        ignored: whether a name may be present although it is not read.
        """
        problems = []
        if missing := sorted(set(expected) - self.names):
            problems.append(f"weights are missing: {some(missing)}")
        if extra := sorted(name for name in self.names - set(expected) if not ignored(name)):
            problems.append(f"the model does not have the weights {some(extra)}")
        shapes = {name: self.shape(name) for name in sorted(self.names & set(expected))}
        if wrong := [f"{n} is {list(s)}, {list(expected[n])} expected" for n, s in shapes.items() if s != expected[n]]:
            problems.append(f"shapes do not match config.json: {some(wrong)}")
        types = {name: self._stored(name).dtype for name in shapes}
        if odd := [f"{name} is {dtype}" for name, dtype in types.items() if dtype not in FLOATS]:
            problems.append(f"weights are not in one of {', '.join(FLOATS)}: {some(odd)}")
        if problems:
            raise UserError(f"{self.folder} does not contain the expected model: {'; '.join(problems)}")


@contextlib.contextmanager
def open_weights(folder: str | pathlib.Path) -> Iterator[Weights]:
    """A context manager that opens the safetensors of a folder.

    Raises:
      UserError: the folder, a file or an indexed tensor is missing, or a file is truncated or not a safetensors file.
    """
    folder = pathlib.Path(folder).expanduser()
    if not os.path.isdir(folder):
        raise UserError(f"the model folder {folder} does not exist; give a folder with config.json and {SINGLE}")
    index = _read_index(folder)
    with contextlib.ExitStack() as stack:
        opened = {}
        for path in (folder / name for name in sorted(set(index.values()) or {SINGLE})):
            if not os.path.exists(path):  # Unlike Path.exists, False also for a name that is too long.
                raise UserError(f"{path} does not exist; a model folder needs {SINGLE}, or {INDEX} and every file it names")
            try:
                opened[path.name] = stack.enter_context(contextlib.closing(_File(path)))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file ({error}); download or copy it "
                                "again") from error
        if not index:
            index = dict.fromkeys(opened[SINGLE].tensors, SINGLE)
        inside = {name: set(file.tensors) for name, file in opened.items()}
        if lost := sorted(name for name, file in index.items() if name not in inside[file]):
            raise UserError(f"{folder / INDEX} lists weights that its files do not contain: {some(lost)}")
        if extra := sorted(f"{name} in {file}" for file in inside for name in inside[file] if index.get(name) != file):
            raise UserError(f"{folder / INDEX} does not list weights that its files contain: {some(extra)}")
        yield Weights(folder, {name: (opened[file], name) for name, file in index.items()})


def weight_files(folder: pathlib.Path) -> tuple[str, ...]:
    """Names of the files with a folder's weights: the single file, or the index and every file that it lists.

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
        index = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
        # A file name with a folder in it could point outside the checkpoint.
        valid = bool(index) and all(isinstance(n, str) and n.isprintable() and n != ".." and pathlib.PurePath(n).name == n
                                      for n in index.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of safetensors files ({error}); download or copy it again") from error
    if not valid:
        raise UserError(f"{path} must map every weight to a file in the same folder; download or copy it again")
    return index


def some(items: list[str]) -> str:
    """The first few names, and the number of the others, for an error message."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(map(shown, items[:_LISTED])) + more


class Planned(NamedTuple):
    """A tensor to be written. size: its bytes."""

    name: str
    shape: tuple[int, ...]
    size: int


def plan(tensors: Sequence[Planned], shard_bytes: int) -> dict[str, list[Planned]]:
    """The tensors of each file, in order. Only a file with a single large tensor may exceed shard_bytes."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write_index(folder: pathlib.Path, planned: dict[str, list[Planned]]) -> None:
    """Writes the index of several files; does nothing for a single file."""
    if SINGLE in planned:
        return
    total = sum(tensor.size for shard in planned.values() for tensor in shard)
    names = {tensor.name: file for file, shard in planned.items() for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: pathlib.Path, tensors: Sequence[Planned], dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
    """Writes one file. blocks: the tensors' values in `dtype`, in order, in blocks of whole rows of any size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {"dtype": DTYPES[dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8)) for block in blocks)
    if written != end:
        raise ValueError(f"{path.name}: {written} bytes of tensors were given, {end} were planned")
