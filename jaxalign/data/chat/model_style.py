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
    path = tokenizer_path(config, Path())
    files = [path / name for name in ("tokenizer.json", "tokenizer.model")] if path.is_dir() else [path]
    return "compact" if any(_MARKER in file.read_bytes() for file in files if file.is_file()) else "hh"


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
    if path.exists() and THINKING not in (read_tokenizer_files(path).chat_template or ""):
        raise UserError(f"config.data.thinking is {thinking!r}, but the chat template of {config.model.path} does not read "
                        f"{THINKING}; leave it at 'auto'")
    return thinking


def _check_style(config: Config, style: str) -> None:
    if config.model.source == "scratch":
        return
    path = tokenizer_path(config, Path())
    if style == "chat" and (path.is_file() or read_tokenizer_files(path).chat_template is None):
        raise UserError(f"config.data.style is 'chat', but {config.model.path} has no chat template; set it to 'auto', or put "
                        "chat_template.jinja there")
    if style == "compact":
        _require_markers(config.model.path, path)


def _require_markers(model: str, path: Path) -> None:
    # These modules import JAX, and few runs need them.
    from jaxalign.data.chat.formats import USER
    from jaxalign.data.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(path)
    try:
        tokenizer.marker_id(USER)
    except UserError:
        raise UserError(f"config.data.style is 'compact', but the tokenizer of {model} has no symbol {USER!r}, which only "
                        "models trained from scratch by jaxalign have; set it to 'auto', 'chat' or 'hh'") from None
