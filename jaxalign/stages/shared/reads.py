"""The config fields, earlier stages and external files that several stages read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxalign.config import Config
from jaxalign.config.finished import base_stage, tokenizer_path
from jaxalign.data.tokenizers import files as tokenizer_files
from jaxalign.models.adapters import peft_config, peft_folder
from jaxalign.models.checkpoints.safetensors import weight_files
from jaxalign.registry.data_sources import PROMPT_FILES, data_source
from jaxalign.registry.stages import policies_before
from jaxalign.stages.shared.manifest import FILE

BASE_FIELDS = ("model", "seed")
MODEL_FIELDS = (*BASE_FIELDS, "lora")
WORLD_FIELDS = ("data.source", "world", "arithmetic")
PROMPT_FIELDS = ("data", "world", "arithmetic")
JUDGE_FIELDS = (
    *("feedback.constitution", "feedback.judge", "feedback.judge_stage", "feedback.templates", "feedback.thinking"),
    *("judge.path", "judge.weights", "judge.compute_dtype", "judge.max_length", "endpoint.model", "endpoint.votes"),
)
LABEL_FIELDS = JUDGE_FIELDS + tuple(
    f"feedback.{name}"
    for name in (
        "reasoning", "clamp_low", "clamp_high", "principles_per_comparison", "undecided_margin", "reasoning_temperature",
        "max_reasoning_tokens", "max_outside_mass", "ties", "aggregate", "second_order", "consistent", "reasonings",
    )
)


def base_stages(config: Config) -> tuple[str, ...]:
    """The stage that trains the helpful-only base; empty if config.model is a pretrained model."""
    return ("pretrain",) if config.model.source == "scratch" else ()


def policy_stages(config: Config, before: str) -> tuple[str, ...]:
    """The stage that provides the starting weights of stage `before`: the last planned policy stage, or the base's stage."""
    return policies_before(config.stages, before)[-1:] or base_stages(config)


def plugin_file(name: str, field: str) -> dict[Path, str]:
    """The file in a name of the form "FILE.py:name", with the config field that has the name; empty for another name."""
    place = name.rpartition(":")[0]
    return {Path(place).expanduser(): field} if place.endswith(".py") else {}


def data_files(config: Config) -> dict[Path, str]:
    """The files that the data source reads, with the config field that names each. A user's source file is one of them."""
    record, paths = data_source(config), plugin_file(config.data.source, "data.source")
    if record.rows or record.reads is None:
        named = {Path(path).expanduser(): "data.extra_train" for path in config.data.extra_train}
        for name in ("train", *PROMPT_FILES):
            path = getattr(config.data, name)
            named |= {Path(path).expanduser(): f"data.{name}"} if path else {}
        paths |= named
    return paths


def base_files(config: Config) -> dict[Path, str]:
    """The files of a pretrained base model and of the adapters to start from, with the config fields that name them."""
    if config.model.source == "scratch":
        return {}
    if config.lora.path:
        adapters = Path(config.lora.path).expanduser()
        own = {adapters / name: "lora.path" for name in (peft_config.CONFIG, peft_folder.WEIGHTS)}
        return own | base_files(dataclasses.replace(config, lora=dataclasses.replace(config.lora, path="")))
    return {path: "model.path" for path in _model_files(config)} or {
        Path(config.model.path).expanduser() / "config.json": "model.path"
    }


def _model_files(config: Config, weights: bool = True) -> list[Path]:
    """The files of a pretrained model that exist. The manifest of a stage identifies its weights: results depend on nothing
    else. weights: whether the model's weights are read."""
    stage = base_stage(config)
    if stage is None:
        folder = Path(config.model.path).expanduser()
        names = ("config.json", *tokenizer_files.NAMES, *(weight_files(folder) if weights else ()))
        return [folder / name for name in names if (folder / name).exists()]
    adapters = stage.name != "pretrain" and bool(stage.config.lora.rank or stage.config.lora.path)
    if stage.config.model.source == "huggingface":
        return [stage.directory / FILE, *_model_files(stage.config, weights=weights and adapters)]
    base = [stage.workdir / "pretrain" / FILE] if adapters else []
    return [stage.directory / FILE, *base, tokenizer_path(stage.config, stage.workdir)]
