"""Reads the folder of a finished stage of a run: its name, its config and its tokenizer's place, without JAX and weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import rounds, schema
from jaxalign.config.root import Config, default_for
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
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
        return rounds.workdir_of(self.directory)

    @property
    def language_model_stages(self) -> tuple[str, ...]:
        """The stages of the run that train a language model."""
        return ("pretrain", *policy_makers(self.config.stages))


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
    if any(name not in manifest for name in ("stage", "status")) or not isinstance(manifest.get("config"), dict):
        raise UserError(f"{stage / 'manifest.json'} is damaged; restore the file, or move the folder away to run the stage "
                        "again")
    if manifest["status"] != "done":
        raise UserError(f"stage {manifest['stage']} is unfinished in {stage}; finish it first")
    return FinishedStage(manifest["stage"], stage, folder, _run_config(rounds.workdir_of(stage), manifest["config"]))


def language_model_stage(source: Path) -> FinishedStage:
    """Like `finished_stage`, for a stage that trained a language model. Raises UserError also for other stages."""
    stage = finished_stage(source)
    if stage.name not in stage.language_model_stages:
        raise UserError(f"{source} belongs to the stage {stage.name}, which does not train a language model; give one of "
                        f"{', '.join(stage.language_model_stages)}")
    return stage


def base_stage(config: Config) -> FinishedStage | None:
    """The stage at config.model.path; None if the path is not the folder of a stage of a run, or the model is not pretrained.

    Raises:
      UserError: the stage has not finished, or did not train a language model.
    """
    folder = Path(config.model.path).expanduser()
    if config.model.source != "huggingface" or not is_stage(folder):
        return None
    try:
        return language_model_stage(folder)
    except UserError as error:
        raise UserError(f"config.model.path: {error}") from None


def tokenizer_path(config: Config, workdir: Path) -> Path:
    """The folder or file with the tokenizer of the run in `workdir`."""
    if config.model.source == "scratch":
        return workdir / "pretrain" / "tokenizer.model"
    stage = base_stage(config)
    return Path(config.model.path).expanduser() if stage is None else tokenizer_path(stage.config, stage.workdir)


def is_stage(folder: Path) -> bool:
    """Whether the folder, or its parent for a member of an ensemble, has a stage's manifest, and is not that of a model."""
    stage = folder.parent if folder.name.startswith("member-") else folder
    return os.path.exists(stage / "manifest.json") and not is_model(folder)


def is_model(folder: Path) -> bool:
    """Whether the folder has a model's config.json."""
    return "model_type" in read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist or contains another value.

    Raises:
      UserError: the file is not JSON.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); restore the file") from None
    return content if isinstance(content, dict) else {}


def _run_config(workdir: Path, made_with: Mapping[str, Any]) -> Config:
    """The run's config, with the stage's values for fields that changed after the stage ran."""
    values = read_json(workdir / "config.json")
    if "stages" not in values:
        raise UserError(f"{workdir} has no config.json of a run; give a stage's folder inside the work directory of its run")
    for dotted, value in made_with.items():
        *parents, last = dotted.split(".")
        node: Any = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise UserError(f"{workdir / 'config.json'} has no section {'.'.join(parents)}; the file was edited or damaged: "
                            "restore it")
        node[last] = value
    for name in ("mesh", "placement"):  # This machine need not have the run's devices.
        values.pop(name, None)
    return schema.from_mapping(default_for(values["stages"]), values)


def with_model_folder(config: Config, folder: str) -> Config:
    """The config with a folder as its pretrained model, without adapters, for functions that read the files of one."""
    model = dataclasses.replace(config.model, source="huggingface", path=folder, family="")
    return dataclasses.replace(config, model=model, lora=type(config.lora)())
