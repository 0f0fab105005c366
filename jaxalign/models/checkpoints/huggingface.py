"""Loads Hugging Face checkpoints: reads and checks config.json, and reads the weights into the decoder's parameters.

The families (`jaxalign.models.families`) define the differences between models. Each device reads only its own slices, block by
block, so the host never holds more than a few blocks, whatever the size of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxalign.config.base import nearest_divisors
from jaxalign.data.sources.jsonl import read_object
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.quantised import quantise_leaf, reading_dtype
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.blocks import place_blocks, row_blocks
from jaxalign.models.checkpoints.layout import Bounds, Place, places
from jaxalign.models.checkpoints.safetensors import Weights, open_weights
from jaxalign.models.checkpoints.wrappers import WRAPPERS, say_text_only, text_fields, text_weights
from jaxalign.models.families.base import Fields
from jaxalign.models.model import Model, Params
from jaxalign.registry.families import FAMILIES, Family

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which weights are read and written."""
# Buffers that old files also contain; config.json determines their values.
_DERIVED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The contents of config.json.

    head: "lm", or "scalar" for a reward model (...ForSequenceClassification with one label).
    max_positions: the model's longest sequence, None if not given; likewise, bos_id is None and eos_ids is empty.
    raw: the fields as they are in the file; of a multimodal model, those of its text model.
    wrapper: the model_type of the multimodal model, None for a text model.
    """

    family: Family
    decoder: DecoderConfig
    head: str
    max_positions: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    raw: dict[str, Any] = dataclasses.field(repr=False)
    wrapper: str | None = None


def read_config(folder: str | pathlib.Path, compute_dtype: str = "float32", vocab_multiple: int = 1) -> CheckpointConfig:
    """Reads config.json; its model_type selects the family.

    Raises:
      UserError: the file is missing or malformed, or has an unsupported field (the error gives its name and value).
    """
    path = pathlib.Path(folder).expanduser() / "config.json"
    if not os.path.isfile(path):  # Unlike Path.is_file, False also for a name that is too long.
        raise _without_config(path)
    return parse_config(path, read_object(path), compute_dtype, vocab_multiple)


def _without_config(path: pathlib.Path) -> UserError:
    """The error for a folder without config.json, such as one with the adapters that PEFT writes, or the parent of the right
    one."""
    folder = path.parent
    if not os.path.isfile(adapters := folder / "adapter_config.json"):
        inside = sorted(folder.glob("*/config.json"))
        near = f": {inside[0].parent} has one" if len(inside) == 1 else ""
        return UserError(f"{path} does not exist; a folder in Hugging Face format, with config.json, is expected{near}")
    fields = read_object(adapters)
    base = fields.get("base_model_name_or_path")
    has = f"{folder} has only adapters (adapter_config.json) of the base model {base or '(not named there)'}"
    if "score" in (fields.get("modules_to_save") or ()):
        return UserError(f"{has}; merge them with merge_and_unload() of the peft library, and give the folder of the result")
    return UserError(f"{has}; give the folder of the base model, BASE, and set lora.path to {folder}, or merge both with "
                     f"jaxalign.load_model(BASE, lora=jaxalign.Lora(path={str(folder)!r})).save(NEW) and give the folder NEW")


def parse_config(path: pathlib.Path, raw: Any, compute_dtype: str = "float32", vocab_multiple: int = 1) -> CheckpointConfig:
    """`read_config` of the given contents. path: only for error messages."""
    if isinstance(raw, dict) and "stages" in raw:
        raise UserError(f"{path.parent} is the work directory of a run; give the folder of one of its models, such as "
                        f"{path.parent / 'ppo'}")
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UserError(f"{path} is not a model's config: it has no model_type, such as 'llama'")
    wrapper = None
    if raw["model_type"] in tuple(WRAPPERS):  # A tuple, since the value may not be hashable.
        wrapper, raw = raw["model_type"], text_fields(path, raw)
    fields = Fields(path, raw)
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise fields.unsupported("model_type", kind, f"{', '.join((*FAMILIES.names(), *WRAPPERS))}, or a family of your own "
                                 "(model.family),")
    family = FAMILIES.get(kind)
    head = _head(fields, family)
    try:
        decoder = DecoderConfig(
            **family.load("decoder")(fields), compute_dtype=compute_dtype, vocab_multiple=vocab_multiple
        )
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except TypeError as error:
        raise UserError(f"{path}: the model family {family.model_type!r} does not give the arguments of DecoderConfig "
                        f"({error})") from error
    fields.finish()
    limits = [decoder.rope_scaling and decoder.rope_scaling.positions]
    limits += [None if raw.get("max_position_embeddings") is None else fields.integer("max_position_embeddings")]
    positions = min((limit for limit in limits if limit is not None), default=None)
    bos, eos = raw.get("bos_token_id"), raw.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    for name, values in (("bos_token_id", () if bos is None else (bos,)), ("eos_token_id", eos_ids)):
        if any(type(value) is not int for value in values):
            raise UserError(f"{path}: {name} is {raw[name]!r}; a token id is expected")
        # `check_vocabulary` compares the ids of eos with the embedding and with those of the tokenizer.
        if any(value < 0 or (value >= decoder.vocab and name == "bos_token_id") for value in values):
            raise UserError(f"{path}: {name} is {raw[name]!r}; an id of the vocabulary is expected, 0 to {decoder.vocab - 1}")
    return CheckpointConfig(family, decoder, head, positions, bos, eos_ids, raw, wrapper)


def _head(fields: Fields, family: Family) -> str:
    named = fields.get("architectures", [family.architecture])
    if named == [family.architecture]:
        return "lm"
    if named != [family.classifier]:
        raise fields.unsupported("architectures", named, f"[{family.architecture!r}] or [{family.classifier!r}]")
    names = fields.get("id2label", {"0": "", "1": ""})  # The format's default is two labels.
    labels = fields.get("num_labels", len(names) if isinstance(names, dict) else names)
    if labels != 1 or isinstance(labels, bool):
        raise UserError(f"{fields.path}: a {family.classifier} with {labels} labels; one label, the reward, is expected")
    return "scalar"


def dtype_name(dtype: Any, name: str) -> str:
    """The name of a dtype of weights. dtype: a name in `DTYPES`, or a NumPy or JAX dtype. Raises UserError for another one."""
    try:
        found = "" if dtype is None else np.dtype(dtype).name
    except TypeError:
        found = ""
    if found not in DTYPES:
        raise UserError(f"{name} is {dtype!r}; one of {', '.join(DTYPES)} is expected")
    return found


def own_dtype(raw: Mapping[str, Any]) -> str:
    """The dtype of the weights according to config.json; float32 if it gives no supported dtype."""
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    return dtype if dtype in DTYPES else "float32"


def check_length(folder: str | pathlib.Path, config: CheckpointConfig, max_length: int) -> None:
    """Raises UserError if the run's longest sequence exceeds the model's positions."""
    if config.max_positions is not None and max_length > config.max_positions:
        raise UserError(
            f"model.max_length is {max_length}, but {folder} supports at most {config.max_positions} positions; "
            "lower it"
        )


def check_vocabulary(folder: str | pathlib.Path, config: CheckpointConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if the tokenizer has an id, or the folder a stop id, that the embedding lacks.

    The embedding may be larger, since some are padded. If the files disagree about bos and eos, texts begin and end with the
    tokenizer's tokens, and the other eos ids are additional stop ids (`Tokenizer.stop_ids`).
    """
    highest = max(tokenizer.vocab_size - 1, *tokenizer.stop_ids)
    if highest >= config.decoder.vocab:
        raise UserError(
            f"the tokenizer in {folder} has ids up to {highest}, but config.json says vocab_size {config.decoder.vocab}; give "
            "the tokenizer that the weights were trained with"
        )


def load_params(folder: str | pathlib.Path, model: Model, dtype: str = "float32", kind: str = "float32") -> Params:
    """Loads the parameters of `model` from the folder's safetensors, in `dtype`, sharded like the model.

    With another `kind` than "float32" the result is that of `quantise`, but each weight is converted when it has been read: the
    devices never hold the whole model in `dtype`.

    The padding rows of the tables are zeros. Rotary tables and causal masks are not read. The output projection of a model with
    tied embeddings must equal the embedding, if the file has one.

    Raises:
      UserError: weights are missing, unexpected, of a wrong shape or type, or not finite, the mesh does not divide them, or
        the folder contains another kind of model.
    """
    config = read_config(folder)
    if config.head != model.head:
        kinds = {"lm": "a language model", "scalar": "a model with a scalar head"}
        raise UserError(f"{folder} contains {kinds[config.head]} ({', '.join(config.raw.get('architectures') or ['no name'])});"
                        f" {kinds[model.head]} is expected")
    check_mesh(model)
    stored, family = places(config.family, model), config.family
    tied_head = family.lm_head if model.head == "lm" and model.config.tie_embeddings else None
    abstract, params = model.abstract(), {}
    with open_weights(folder) as weights:
        if config.wrapper is not None:
            say_text_only(pathlib.Path(folder), config.wrapper)
            weights = weights.renamed(text_weights(weights.names))
        shapes = {place.name(number): place.stored_shape for place in stored for number in np.ndindex(place.stack)}
        weights.check(shapes, lambda name: name.endswith(_DERIVED) or name == tied_head)
        if tied_head in weights.names:
            _check_tied(weights, stored, tied_head)
        for place in stored:
            path = place.weight.path
            leaf = functools.reduce(operator.getitem, path, abstract)
            files = {weights.dtype(place.name(number)) for number in np.ndindex(place.stack)}
            read = reading_dtype(path, kind, files) if dtype == "float32" else np.dtype(dtype)
            value = place_blocks(leaf.shape, read, leaf.sharding, _BlockedLeaves(weights, place, read))
            node = params
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = quantise_leaf(path, value, kind)
    return params


class _BlockedLeaves(NamedTuple):
    """Reads any part of one leaf: `blocks(bounds)` yields the blocks within the leaf's bounds as (start indices, values)."""

    weights: Weights
    place: Place
    dtype: np.dtype

    def __call__(self, bounds: Bounds) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        layout, stack = self.place.layout, len(self.place.stack)
        inner = [(start, min(stop, size)) for (start, stop), size in zip(bounds[stack:], layout.decoder_shape, strict=True)]
        for number in np.ndindex(*(stop - start for start, stop in bounds[:stack])):
            name = self.place.name(tuple(at + start for at, (start, _) in zip(number, bounds[:stack], strict=True)))
            for part in row_blocks(layout, inner, self.dtype.itemsize):
                stored = self.weights.read(name, self.place.window(part), self.dtype)
                begin = tuple(start - origin for (start, _), (origin, _) in zip(part, inner, strict=True))
                yield (*number, *begin), layout.to_decoder(stored, part)[(None,) * stack]


def _check_tied(weights: Weights, stored: tuple[Place, ...], head: str) -> None:
    embedding = next(place for place in stored if place.weight.path == ("embedding",))
    name, layout = embedding.name(()), embedding.layout
    if weights.shape(head) == layout.stored_shape:
        whole = tuple((0, size) for size in layout.decoder_shape)
        windows = (layout.window(part) for part in row_blocks(layout, whole, 4))
        if all(np.array_equal(weights.read(name, window), weights.read(head, window)) for window in windows):
            return
    raise UserError(f"{weights.folder} has a {head} that differs from {name}, though config.json ties the two; "
                    "set tie_word_embeddings to false there, or remove the weight")


def check_mesh(model: Model) -> None:
    c, mesh = model.config, model.sharding.mesh.shape
    inner = {"MLP width": c.mlp} if c.experts is None else {"experts": c.experts.count}
    tensor = {"query heads": c.heads, "key/value heads": c.kv_heads, **inner, "vocabulary": c.table_rows}
    for axis, sizes in {"tensor": tensor, "fsdp": {"hidden size": c.embed}, "pipeline": {"layers": c.layers}}.items():
        for name, size in sizes.items():
            if size % mesh[axis]:
                mend = "; or set model.vocab_multiple to it" if name == "vocabulary" else ""
                near = nearest_divisors(tuple(sizes.values()), mesh[axis])
                raise UserError(
                    f"mesh.{axis} is {mesh[axis]}; it must divide the checkpoint's {name} ({size}): {near} would{mend}"
                )
