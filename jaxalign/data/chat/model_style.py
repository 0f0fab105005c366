"""The settings that a run's model determines: `config.data.style` "auto" and `config.feedback.reasoning` None; and the checks
of other styles against the model's files.

These functions read a model's tokenizer settings, so they are above the config package, which reads no model.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from jaxalign.config import Config, check
from jaxalign.config.finished import base_stage, tokenizer_path
from jaxalign.data.tokenizers.files import THINKING, read_tokenizer_files
from jaxalign.errors import UserError
from jaxalign.registry.stages import stages_in_order

_MARKER = b"<critique_request>"
"""A symbol that only the tokenizers have that jaxalign trains."""


def resolve_auto(config: Config, recorded: str | None = None) -> Config:
    """The config with the values that the model determines: "compact", "hh" or "chat" as data.style, data.thinking of the run
    that a stage belongs to, and whether the judge reasons as feedback.reasoning.

    Args:
        config: the whole config.
        recorded: the style of an earlier run with this model, which replaces "auto" if the model's folder no longer exists.

    Raises:
        UserError: the model does not support the style or data.thinking, a file of it is damaged, or config.model.path is the
            folder of a stage that has not finished or did not train a language model.
    """
    if config.model.source == "huggingface" and not os.path.exists(Path(config.model.path).expanduser()):
        style = (recorded or "hh") if config.data.style == "auto" else config.data.style
    else:
        style = model_style(config)
        _check_style(config, style)
    thinking = _thinking(config, style)
    resolved = dataclasses.replace(config, data=dataclasses.replace(config.data, style=style, thinking=thinking))
    feedback = dataclasses.replace(config.feedback, reasoning=config.feedback.reasons(resolved))
    resolved = dataclasses.replace(resolved, feedback=feedback)
    if resolved != config:
        check(resolved)
    return resolved


def model_style(config: Config) -> str:
    """data.style, or the style that "auto" selects.

    It is "compact" for a model from scratch, that of the run for a stage of a run, "chat" for another model with a chat
    template, "compact" for one whose tokenizer has jaxalign's markers, else "hh".
    """
    if config.data.style != "auto":
        return config.data.style
    if config.model.source == "scratch":
        return "compact"
    stage = base_stage(config)
    if stage is not None:
        return model_style(stage.config)
    folder = Path(config.model.path).expanduser()
    if read_tokenizer_files(folder).chat_template is not None:
        return "chat"
    return "compact" if _has_markers(config) else "hh"


def _thinking(config: Config, style: str) -> str:
    """data.thinking, or for a stage of a run the setting of that run if both use the chat template.

    Raises:
        UserError: it is not "auto", but the style or the chat template does not read it.
    """
    thinking = config.data.thinking
    if thinking == "auto":
        exists = style == "chat" and os.path.exists(Path(config.model.path).expanduser())
        stage = base_stage(config) if exists else None
        return stage.config.data.thinking if stage is not None and model_style(stage.config) == "chat" else "auto"
    if style != "chat":
        raise UserError(f"config.data.thinking is {thinking!r}, but config.data.style is {style!r}, which uses no chat "
                        "template; leave it at 'auto'")
    path = tokenizer_path(config, Path())
    if os.path.exists(path) and THINKING not in (read_tokenizer_files(path).chat_template or ""):
        raise UserError(f"config.data.thinking is {thinking!r}, but the chat template of {config.model.path} does not read "
                        f"{THINKING}; leave it at 'auto'")
    return thinking


def _check_style(config: Config, style: str) -> None:
    if config.model.source == "scratch" or style not in ("chat", "compact"):
        return
    path = tokenizer_path(config, Path())
    if style == "chat" and os.path.isdir(path) and read_tokenizer_files(path).chat_template is not None:
        return
    # These modules import JAX, and few runs need them.
    from jaxalign.data.chat.styles import require_style
    from jaxalign.data.tokenizers.load import load_tokenizer

    require_style(load_tokenizer(path), style, "config.data.style")


def _has_markers(config: Config) -> bool:
    """Whether the tokenizer of a pretrained model has jaxalign's markers."""
    path = tokenizer_path(config, Path())
    files = [path / name for name in ("tokenizer.json", "tokenizer.model")] if os.path.isdir(path) else [path]
    return any(_MARKER in file.read_bytes() for file in files if os.path.isfile(file))


def check_data(config: Config) -> None:
    """Checks that a pretrained model is not trained on data that is only for models from scratch.

    Raises:
        UserError: stage pretrain would train a base that no stage reads, or the rows would be those of the embedded world,
            although the model's tokenizer has no markers for it and `config.world.with_own_model` does not ask for it.
    """
    if config.model.source == "scratch" or not os.path.exists(Path(config.model.path).expanduser()):
        return
    records = stages_in_order(config.stages)
    if any(record.name == "pretrain" for record in records):
        others = ",".join(name for name in config.stages if name != "pretrain")
        raise UserError("config.stages has pretrain, which trains a base from scratch, but config.model.source is "
                        f"'huggingface', so no stage would read that base: set config.stages to {others}")
    readers = [record.name for record in records if record.learns_from]
    if config.data.source != "world" or config.world.with_own_model or not readers or _has_markers(config):
        return
    raise UserError(f"config.data.source is 'world', its default, so {', '.join(readers)} would use the toy prompts of the "
                    f"embedded world with {config.model.path}: set config.data.source to 'prompts_jsonl' and "
                    "config.data.red_team (for revise) or config.data.rl to a file of your prompts, or to 'preferences_jsonl' "
                    "and config.data.train to a file of your pairs, or config.world.with_own_model to True for the toy prompts")
