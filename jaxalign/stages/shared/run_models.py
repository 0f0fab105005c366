"""The models of a run and their weights, by role."""

from __future__ import annotations

import functools

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.tokenizers.load import Tokenizer, load_run_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters import peft_folder
from jaxalign.models.adapters.lora import join, trained
from jaxalign.models.checkpoints import huggingface, run_folder
from jaxalign.models.configured import base_config, configured_model
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import make_sharding
from jaxalign.stages.shared import reads
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.steps.checkpoint import copy_params, load_params
from jaxalign.steps.offload import FrozenRole

sharding = functools.cache(make_sharding)
"""The sharding for the run's mesh (the same object for equal meshes)."""


def load_tokenizer(context: StageContext) -> Tokenizer:
    """The pretrained model's tokenizer, or the one that stage pretrain trained, with `data.thinking`."""
    return load_run_tokenizer(context.config, context.workdir)


def make_model(config: Config, vocab: int, head: str = "lm") -> Model:
    """The run's architecture with its adapters. vocab: the tokenizer's size; a pretrained model's vocabulary may be larger."""
    return configured_model(config, vocab, head, sharding(config.mesh))


_kept_base: dict[tuple, Params] = {}


def base_params(context: StageContext, model: Model) -> Params:
    """The weights of the helpful-only base. With adapters they are read once, and all roles share them."""
    if model.lora is None:
        return _read_base(context, model)
    kind = context.config.lora.base
    # The version changes when the base is trained again, or its files are replaced, while this process runs.
    if context.config.model.source == "scratch":
        manifest = read_manifest(context.input_directory("pretrain"))
        version = () if manifest is None else (manifest.output_hash,)
    else:
        files = [path.stat() for path in reads.base_files(context.config) if path.exists()]
        version = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
    key = (context.workdir, context.config.model, kind, version)
    if any(kept[:-1] != key for kept in _kept_base):
        _kept_base.clear()
    placed = (*key, model.sharding)  # Roles on meshes of their own each have a copy.
    if placed not in _kept_base:
        _kept_base[placed] = _read_base(context, model.base, kind)
    return _kept_base[placed]


def _read_base(context: StageContext, model: Model, kind: str = "float32") -> Params:
    """Reads the base, after checking that the length and the vocabulary of a model folder fit the run."""
    config = context.config
    if config.model.source == "huggingface":
        base = base_config(config, context.workdir)
        huggingface.check_length(config.model.path, base, config.model.max_length)
        huggingface.check_vocabulary(config.model.path, base, load_tokenizer(context))
    return run_folder.base_params(config, context.workdir, model, kind)


def start_params(context: StageContext, model: Model) -> Params:
    """The weights that the first policy stage starts from: the base, with the adapters of config.lora.path, if set.

    Raises:
      UserError: the adapters belong to a reward model.
    """
    base, path = base_params(context, model), context.config.lora.path
    if not path:
        return base
    _, adapters = peft_folder.load_adapters(path, base_config(context.config, context.workdir).family, model.base)
    if "score" in adapters:
        raise UserError(f"config.lora.path is {path!r}, which has the adapters of a reward model (modules_to_save has "
                        "'score'); give the adapters of a language model")
    return join(base, adapters)


def stage_params(context: StageContext, stage: str, model: Model) -> Params:
    """The final weights of an earlier stage, joined with the base if they are adapters. "base" gives `start_params`."""
    if stage in ("base", "pretrain"):
        return start_params(context, model)
    return with_base(context, model, load_params(context.input_directory(stage) / "params", model))


def with_base(context: StageContext, model: Model, params: Params) -> Params:
    """Trained parameters; with adapters, joined with the frozen base."""
    return params if model.lora is None else {**base_params(context, model), **params}


def frozen_params(context: StageContext, model: Model) -> Params | None:
    """The parameters that training does not change: with adapters the base, else None."""
    return None if model.lora is None else base_params(context, model)


def frozen_role(context: StageContext, model: Model, params: Params) -> FrozenRole:
    """Parameters that are never trained, offloaded if `config.mesh.offload` has "frozen". The base under adapters is shared and
    not offloaded."""
    return FrozenRole(params, "frozen" in context.config.mesh.offload, frozen_params(context, model))


def trained_params(context: StageContext, model: Model, params: Params, stage: str, shared: bool = True) -> Params:
    """The parameters that training starts from: all of a policy's weights, or its adapters (new ones if it has none).

    Their buffers may be donated. shared: whether other roles also read `params`, so that training needs a copy.
    """
    if model.lora is None:
        return copy_params(params) if shared else params
    own = trained(params)
    return copy_params(own) if own else model.init_adapters(params, context.key(stage, streams.ADAPTERS))


def policy_params(context: StageContext, model: Model, before: str) -> Params:
    """The weights that stage `before` starts from."""
    if context.start:
        return with_base(context, model, load_params(context.workdir / context.start / "params", model))
    return stage_params(context, next(iter(reads.policy_stages(context.config, before)), "base"), model)
