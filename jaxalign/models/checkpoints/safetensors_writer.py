"""Writes safetensors tensor by tensor, as a single file or as shards with an index, with the file names of `transformers`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxalign.models.checkpoints.safetensors import FLOATS, INDEX, SINGLE

DTYPES = {np.dtype(kind).name: name for name, kind in FLOATS.items() if name != "F64"}


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
