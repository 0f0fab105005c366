"""Reads the folder of a finished stage of a run: its config, base model and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Config, default_for, schema
from jaxalign.config.renames import leaves_with_current_names, with_current_names
from jaxalign.data.tokenizers.export import tokenizer_files
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.orbax import load_params
from jaxalign.models.configured import configured_model
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.families import use_family
from jaxalign.registry.stages import policy_makers


class FinishedStage(NamedTuple):
    """A finished stage of a run.

    name: the stage's name. directory: its folder. weights: the folder of its params, which differs for a member of an ensemble.
    config: the run's config with the values that the stage ran with, without the mesh.
    """

    name: str
    directory: Path
    weights: Path
    config: Config

    @property
    def workdir(self) -> Path:
        """The folder of the run."""
        return self.directory.parent

    @property
    def language_model_stages(self) -> tuple[str, ...]:
        """The stages of the run that train a language model."""
        return ("pretrain", *policy_makers(self.config.stages))


class Base(NamedTuple):
    """The base model of a run: the fields of its config.json, the folder of its tokenizer files, further files by name, its
    tokenizer, and the rows of its embedding table."""

    fields: dict[str, Any]
    folder: Path
    files: Mapping[str, str]
    tokenizer: Tokenizer
    vocab: int


def finished_stage(source: Path) -> FinishedStage:
    """Reads the folder of a finished stage, or of a member of its ensemble.

    Raises:
      UserError: the folder is not that of a stage, or the stage has not finished.
    """
    folder = source.absolute()
    stage = folder.parent if folder.name.startswith("member-") else folder
    manifest = read_json(stage / "manifest.json")
    if not manifest:
        raise UserError(f"{source} contains params, but neither a model's config.json nor a stage's manifest.json; give a "
                        "folder that jaxalign.convert wrote, or the folder of a stage of a run")
    if any(name not in manifest for name in ("stage", "status", "config")):
        raise UserError(f"{stage / 'manifest.json'} is damaged; restore the file, or move the folder away to run the stage "
                        "again")
    if manifest["status"] != "done":
        raise UserError(f"stage {manifest['stage']} is unfinished in {stage}; finish it first")
    return FinishedStage(manifest["stage"], stage, folder, _run_config(stage.parent, manifest["config"]))


def is_stage(folder: Path) -> bool:
    """Whether the folder, or its parent for a member of an ensemble, contains a stage's manifest."""
    stage = folder.parent if folder.name.startswith("member-") else folder
    return (stage / "manifest.json").exists()


def _run_config(workdir: Path, made_with: Mapping[str, Any]) -> Config:
    """The run's config, with the stage's values for fields that changed after the stage ran."""
    values = read_json(workdir / "config.json")
    if "stages" not in values:
        raise UserError(f"{workdir} has no config.json of a run; give a stage's folder inside the work directory of its run")
    values = with_current_names(values)
    for dotted, value in leaves_with_current_names(made_with).items():
        *parents, last = dotted.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[last] = value
    values.pop("mesh", None)  # This machine need not have the run's devices.
    return schema.from_mapping(default_for(values["stages"]), values)


def base_of(config: Config, workdir: Path) -> Base:
    """The base model of the run in `workdir`, without its weights."""
    if config.model.source == "huggingface":
        if config.model.family:
            use_family(config.model.family, "config.model.family")
        folder = Path(config.model.path).expanduser()
        found = huggingface.read_config(folder)
        return Base(dict(found.raw), folder, {}, load_tokenizer(folder), found.decoder.vocab)
    folder = workdir / "pretrain"
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    fields = config_json(configured_model(config, tokenizer.vocab_size).config, config.model.max_length)
    fields |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return Base(fields, folder, tokenizer_files(folder / "tokenizer.model"), tokenizer, tokenizer.vocab_size)


def policy_model(stage: FinishedStage, vocab: int, sharding: Sharding | None) -> Model:
    """The language model whose parameters the stage wrote, with the run's adapters unless the stage is pretrain."""
    model = configured_model(stage.config, vocab, "lm", sharding)
    model = model.base if stage.name == "pretrain" else model
    huggingface.check_mesh(model)
    return model


def frozen_base(config: Config, workdir: Path, model: Model) -> Params | None:
    """The frozen weights under a stage's adapters, quantised as in the stage; None without adapters."""
    if model.lora is None:
        return None
    if config.model.source == "huggingface":
        return quantise(huggingface.load_params(config.model.path, model.base), config.lora.base)
    return quantise(load_params(workdir / "pretrain" / "params", model.base), config.lora.base)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist or contains another value.

    Raises:
      UserError: the file is not JSON.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); restore the file") from None
    return found if isinstance(found, dict) else {}


def is_model(folder: Path) -> bool:
    """Whether the folder has a model's config.json."""
    return "model_type" in read_json(folder / "config.json")
