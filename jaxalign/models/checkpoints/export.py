"""Writes the decoder's parameters as a Hugging Face checkpoint that `transformers` and compatible tools can load."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.config.arguments import make_folder
from jaxalign.data.tokenizers.export import folder_files
from jaxalign.errors import UserError
from jaxalign.models.blocks import fetch, row_blocks
from jaxalign.models.checkpoints.huggingface import parse_config
from jaxalign.models.checkpoints.layout import Place, places
from jaxalign.models.checkpoints.safetensors import Planned, plan, write_file, write_index
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts

SHARD_BYTES = 4_000_000_000
# The names of tokenizer files in the Hugging Face layout.
TOKENIZER_FILES = (
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)
_GENERATION = "generation_config.json"


def export(
    folder: str | pathlib.Path,
    model: Model,
    params: Params,
    *,
    config: Mapping[str, Any],
    source: pathlib.Path | None = None,
    files: Mapping[str, str] | None = None,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    card: str = "",
) -> None:
    """Writes a checkpoint. The write is atomic: the folder is complete or does not exist.

    Args:
      folder: a new or empty folder.
      model: with the head "lm" or "scalar" (which becomes ...ForSequenceClassification with one label).
      params: its parameters, on any mesh; the padding of the tables is left out.
      config: fields of config.json. This function sets those that describe the output (architecture, dtype, labels).
      source: a folder whose tokenizer files and generation_config.json are copied; a SentencePiece model also becomes a
        tokenizer.json.
      files: the texts of further files, by name.
      dtype: "float32", "bfloat16" or "float16".
      shard_bytes: the maximum size of a file.
      card: the text of README.md; "" writes none.

    With several processes all must call it; the first one writes.

    Raises:
      UserError: the folder is not empty, or the weights are not finite or out of range for `dtype`.
    """
    folder = pathlib.Path(folder).expanduser()
    check_target(folder)
    config, kind = config_fields(model, config, dtype), np.dtype(dtype)
    family = parse_config(folder / "config.json", config).family
    stored: dict[str, list[tuple[Place, tuple[int, ...]]]] = {}
    # Layer by layer, so that a layer's weights are together in one file.
    tensors = ((place, number) for place in places(family, model) for number in np.ndindex(place.stack))
    for place, number in sorted(tensors, key=lambda both: both[1][:1]):
        stored.setdefault(place.name(number), []).append((place, number))
    shapes = {name: parts[0][0].stored_shape for name, parts in stored.items()}
    planned = plan(
        [Planned(name, shape, math.prod(shape) * kind.itemsize) for name, shape in shapes.items()], shard_bytes
    )
    writes = hosts.is_first()
    with whole_folder(folder) as temporary:
        for file, tensors in planned.items():
            blocks = (block for tensor in tensors for block in _blocks(params, tensor.name, stored[tensor.name], kind))
            if writes:
                write_file(temporary / file, tensors, kind, blocks)
            else:
                for _ in blocks:  # Only participates in gathering the blocks.
                    pass
        if writes:
            write_index(temporary, planned)
            converted = {} if source is None or files else folder_files(source)
            write_texts(temporary, config, source, converted | dict(files or {}), generates=model.head == "lm")
            write_card(temporary, card)


def write_card(folder: pathlib.Path, text: str) -> None:
    """Writes README.md, if it has a text."""
    if text:
        (folder / "README.md").write_text(text, encoding="utf-8")


def check_target(folder: pathlib.Path) -> None:
    """Raises UserError unless the folder is new or empty."""
    if hosts.once(lambda: folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder} already exists; give the name of a new folder, or remove it first")


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder next to `folder`, renamed to `folder` at the end or removed if the block fails. Several processes
    share it; the first one creates and renames it."""
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.{hosts.once(os.getpid)}.tmp")

    def make() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(temporary, "folder")

    hosts.once(make)
    try:
        yield temporary
        hosts.wait()
        hosts.once(lambda: os.replace(temporary, folder))
    finally:
        if hosts.is_first():
            shutil.rmtree(temporary, ignore_errors=True)


def _blocks(params: Params, name: str, parts: Sequence[tuple[Place, tuple[int, ...]]], dtype: np.dtype) -> Iterator[np.ndarray]:
    """One stored tensor in blocks of rows, from all leaves that it contains."""
    parts = sorted(parts, key=lambda part: part[0].weight.pick)
    if len(parts) > 1 and parts[0][0].layout.parts == 1:  # The parts follow each other.
        for part in parts:
            yield from _blocks(params, name, [part], dtype)
        return
    layout = parts[0][0].layout
    leaves = [functools.reduce(operator.getitem, place.weight.path, params) for place, _ in parts]
    number = tuple((at, at + 1) for at in parts[0][1])
    for bounds in row_blocks(layout, tuple((0, size) for size in layout.decoder_shape), 4):
        values = [fetch(leaf, (*number, *bounds)).reshape([stop - start for start, stop in bounds]) for leaf in leaves]
        with np.errstate(over="ignore"):
            block = layout.to_stored(values, bounds).astype(dtype)
        if not np.isfinite(block).all():
            finite = all(np.isfinite(value).all() for value in values)
            why = f"too large for {dtype}; choose another dtype" if finite else "that are not finite"
            raise UserError(f"nothing was written: {name} contains numbers {why}")
        yield block


def config_fields(model: Model, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of config.json for this model.

    Raises:
      UserError: the fields are not supported.
      ValueError: the fields describe another model.
    """
    config = {name: value for name, value in config.items() if name not in ("num_labels", "architectures")}
    parsed = parse_config(pathlib.Path("config.json"), config)
    sizes = {"compute_dtype": "float32", "vocab_multiple": 1}
    if parsed.decoder != dataclasses.replace(model.config, **sizes):
        raise ValueError(f"config describes {parsed.decoder}, the model is {model.config}")
    if model.head == "scalar":
        labels = {"architectures": [parsed.family.classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    else:
        labels = {"architectures": [parsed.family.architecture]}
    return config | labels | {"dtype" if "dtype" in config else "torch_dtype": dtype}


def write_texts(
    folder: pathlib.Path, config: Mapping[str, Any], source: pathlib.Path | None, files: Mapping[str, str], generates: bool
) -> None:
    """Writes all files except the weights: config.json, the source's tokenizer, `files`, and a generating model's config."""
    objects = {"config.json": config}
    copy_files(folder, source, (*TOKENIZER_FILES, *((_GENERATION,) if generates else ())), files)
    if generates and not (folder / _GENERATION).exists():
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        objects[_GENERATION] = {name: config[name] for name in ids if config.get(name) is not None}
    for name, content in objects.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(folder: pathlib.Path, source: pathlib.Path | None, names: Sequence[str], files: Mapping[str, str]) -> None:
    """Copies the files of `source` that exist, then writes `files`, which take precedence."""
    for name in names if source is not None else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
