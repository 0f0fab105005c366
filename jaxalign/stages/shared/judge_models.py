"""The models of local judges: the run's base, the model of an earlier stage, or other folders (`config.judge.path`)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from jaxalign.config import Config
from jaxalign.config.finished import is_model, is_stage, tokenizer_path, with_model_folder
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints.huggingface import CheckpointConfig
from jaxalign.models.checkpoints.model_folder import read_folder
from jaxalign.models.configured import base_config
from jaxalign.models.language_model import load_model
from jaxalign.models.model import Model, Params


class JudgeModel(NamedTuple):
    """A judge's model. max_length: the maximum length of a request with the judge's text, in tokens."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    max_length: int


def check_folder(config: Config, folder: str, field: str = "judge.path") -> CheckpointConfig:
    """Reads config.json of a judge's folder, or that of the base of a stage's folder. field: the config field that names it.

    Raises:
      UserError: the folder does not exist, is not that of a language model, or has fewer positions than `judge.max_length`.
    """
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        raise UserError(f"config.{field} is {folder}, which is not a folder; give the folder of a language model, or of a "
                        "stage of a run")
    settings = base_config(with_model_folder(config, folder), path)
    if settings.head != "lm":
        raise UserError(f"config.{field} is {folder}, a {settings.family.classifier}, which scores texts; a language model is "
                        "expected")
    if settings.max_positions is not None and config.judge.max_length > settings.max_positions:
        raise UserError(f"config.judge.max_length is {config.judge.max_length}, but the judge in {folder} has "
                        f"{settings.max_positions} positions; lower it")
    return settings


def folder_requests(config: Config, folder: str) -> tuple[Tokenizer, int]:
    """(the tokenizer of a judge's folder, the maximum length of a request with the judge's text in tokens).

    Raises:
      UserError: as for `check_folder`.
    """
    length = config.judge.request_length(check_folder(config, folder).max_positions)
    return load_tokenizer(tokenizer_path(with_model_folder(config, folder), Path())), length


def load_folder(config: Config, folder: str) -> JudgeModel:
    """Loads the model in a folder of `config.judge.path` onto the run's mesh, with `config.judge`'s storage and dtype."""
    length = config.judge.request_length(check_folder(config, folder).max_positions)
    settings, kind = config.judge, config.judge.weights
    dtype = "float32" if kind == "float32" else "bfloat16"
    mesh = dataclasses.replace(config.mesh, offload=())  # The stage offloads the judge itself.
    path = Path(folder).expanduser()
    if is_model(path) and not is_stage(path):
        model, params, tokenizer, *_ = read_folder(path, mesh, length, dtype, settings.compute_dtype, kind=kind)
        return JudgeModel(model, params, tokenizer, length)
    loaded = load_model(path, mesh, max_length=length, dtype=dtype, compute_dtype=settings.compute_dtype)
    if loaded.frozen is not None:
        return JudgeModel(loaded.model, join(quantise(loaded.frozen, kind), loaded.params), loaded.tokenizer, length)
    return JudgeModel(loaded.model, quantise(loaded.params, kind), loaded.tokenizer, length)
