"""Reads the folder of a language model: weights, tokenizer and config.json."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxalign.config import Mesh
from jaxalign.data.chat.styles import choose_style
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.huggingface import CheckpointConfig
from jaxalign.models.checkpoints.orbax import load_params
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import make_sharding

UNBOUNDED = 1 << 20
"""The maximum sequence length if config.json gives no limit."""


class StoredModel(NamedTuple):
    """The parts of a model in a folder that is no stage of a run. params: may be quantised. config: the content of config.json;
    max_length, style: as in `LanguageModel`."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    style: str
    max_length: int
    config: CheckpointConfig


def read_folder(
    folder: Path, mesh: Mesh, max_length: int, dtype: str | None, compute_dtype: str | None, style: str | None = None,
    kind: str = "float32",
) -> StoredModel:
    """Reads a Hugging Face folder, or an Orbax folder that `jaxalign.convert` wrote.

    Args:
      folder, mesh, max_length, dtype, compute_dtype, style: as for `load_model`.
      kind: how the weights are stored, one of `quantised.KINDS`. Other kinds than "float32" cannot be trained.

    Raises:
      UserError: as for `load_model`.
    """
    orbax = (folder / "params").is_dir()
    # The tables in an Orbax folder are already padded; others are padded to a multiple of the number of parts in the mesh.
    config = huggingface.read_config(folder, compute_dtype or "float32", 1 if orbax else mesh.tensor)
    if config.head != "lm":
        raise UserError(f"{folder} contains a {config.family.classifier}, which scores texts; a language model is expected")
    model = Model(config.decoder, "lm", make_sharding(mesh))
    huggingface.check_mesh(model)
    tokenizer = load_tokenizer(folder)
    huggingface.check_vocabulary(folder, config, tokenizer)
    style = choose_style(tokenizer, style)
    length = supported_length(folder, max_length, config.max_positions)
    dtype = dtype or huggingface.own_dtype(config.raw)
    if orbax:
        params = quantise(load_params(folder / "params", model, dtype), kind)
    else:
        params = huggingface.load_params(folder, model, dtype, kind)
    return StoredModel(model, params, tokenizer, style, length, config)


def supported_length(folder: Path, asked: int, positions: int | None) -> int:
    """The maximum length of a sequence: `asked`, or, if that is 0, the `positions` of the model.

    Raises:
      UserError: the model has fewer positions than `asked`.
    """
    if positions is not None and asked > positions:
        raise UserError(f"max_length is {asked}, but {folder} supports at most {positions} positions; lower it")
    return asked or positions or UNBOUNDED
