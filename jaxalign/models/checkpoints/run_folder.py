"""The base model of a run, and the language model that a finished stage of a run wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxalign.config import Config
from jaxalign.config.finished import FinishedStage, base_stage, tokenizer_path
from jaxalign.data.tokenizers.export import tokenizer_files
from jaxalign.data.tokenizers.load import Tokenizer, load_run_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import is_quantised, join, merge
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.orbax import load_params
from jaxalign.models.configured import base_config, configured_model
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import Sharding


class Base(NamedTuple):
    """The base model of a run: the fields of its config.json, the folder of its tokenizer files, further files by name, its
    tokenizer, and the size of its vocabulary."""

    fields: dict[str, Any]
    folder: Path
    files: Mapping[str, str]
    tokenizer: Tokenizer
    vocab: int


def base_of(config: Config, workdir: Path) -> Base:
    """The base model of the run in `workdir`, without its weights."""
    base, path = base_config(config, workdir), tokenizer_path(config, workdir)
    # A tokenizer that jaxalign trained is a file, and other programs need it in their format.
    folder, files = (path, {}) if path.is_dir() else (path.parent, tokenizer_files(path))
    return Base(dict(base.raw), folder, files, load_run_tokenizer(config, workdir), base.decoder.vocab)


def base_params(config: Config, workdir: Path, model: Model, kind: str = "float32") -> Params:
    """The weights of the base of the run in `workdir`: those of stage pretrain, of a Hugging Face folder, or of a stage of
    another run, whose adapters are merged.

    Args:
      config: the run's config.
      workdir: the folder of the run.
      model: the base's architecture, without adapters.
      kind: how the weights are stored, one of `quantised.KINDS`.

    Raises:
      UserError: the weights are missing or damaged, or do not fit the model.
    """
    if config.model.source == "scratch":
        return quantise(load_params(workdir / "pretrain" / "params", model), kind)
    stage = base_stage(config)
    if stage is None:
        return huggingface.load_params(config.model.path, model, kind=kind)
    policy, params, frozen = stage_policy(stage, model.sharding)
    if policy.config.table_rows != model.config.table_rows:
        raise UserError(f"config.model.vocab_multiple is {config.model.vocab_multiple}, but the stage at config.model.path "
                        f"{config.model.path} was trained with {stage.config.model.vocab_multiple}; set it to that number, or "
                        "export the stage with jaxalign.convert and give the new folder")
    _, whole = merged(policy, join(frozen, params))
    return quantise(jax.tree.map(lambda leaf: leaf.astype("float32"), whole), kind)


def stage_policy(
    stage: FinishedStage, sharding: Sharding, dtype: str = "float32"
) -> tuple[Model, Params, Params | None]:
    """The language model that a stage trained. -> (the model, the weights that the stage trained in `dtype`, the frozen base
    under its adapters, or None without adapters)."""
    model = policy_model(stage, base_config(stage.config, stage.workdir).decoder.vocab, sharding)
    params, frozen = load_params(stage.weights / "params", model), frozen_base(stage.config, stage.workdir, model)
    if dtype != "float32":
        params, frozen = jax.tree.map(
            lambda leaf: leaf if is_quantised(leaf) else leaf.astype(dtype), (params, frozen), is_leaf=is_quantised
        )
    return model, params, frozen


def merged(model: Model, weights: Params) -> tuple[Model, Params]:
    """Merges adapters into the kernels they belong to. -> (the model without adapters, its parameters)."""
    if model.lora is None:
        return model, weights
    whole, params = dataclasses.replace(model, lora=None), merge(model.lora, weights)
    return whole, {name: value for name, value in params.items() if name in whole.abstract()}


def policy_model(stage: FinishedStage, vocab: int, sharding: Sharding) -> Model:
    """The language model whose parameters the stage wrote, with the run's adapters unless the stage is pretrain."""
    model = configured_model(stage.config, vocab, "lm", sharding)
    model = model.base if stage.name == "pretrain" else model
    huggingface.check_mesh(model)
    return model


def frozen_base(config: Config, workdir: Path, model: Model) -> Params | None:
    """The frozen weights under a stage's adapters, quantised as in the stage; None without adapters."""
    return None if model.lora is None else base_params(config, workdir, model.base, config.lora.base)
