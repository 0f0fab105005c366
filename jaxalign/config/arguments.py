"""Checks the arguments of the Python API, and builds sections from keyword arguments."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import schema
from jaxalign.config.constraints import between
from jaxalign.config.reading import refuse_unread
from jaxalign.config.root import Config, check_batch
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES

SEED = between(0, 2**32 - 1)
"""The seeds of the Python API: a PRNG key has no more bits, so larger seeds would repeat."""


def instance_of(value: Any, kind: type, name: str, expected: str) -> Any:
    """`value` itself. Raises UserError, which completes "EXPECTED is expected", unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {_shown(value)} of type {type(value).__name__}; {expected} is expected")
    return value


def as_name(value: Any, name: str) -> str:
    """`value` itself. Raises UserError unless it is a string with more than spaces."""
    if not instance_of(value, str, name, "a string").strip():
        raise UserError(f"{name} is {value!r}; a string with a letter or a digit is expected")
    return value


def as_text(value: Any, name: str) -> str:
    """`value` itself. Raises UserError unless it is a string that UTF-8 can encode."""
    instance_of(value, str, name, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} has the unpaired surrogate {value[error.start]!r} at character {error.start}, which is not "
                        "text; decode the text again, or remove the character") from None
    return value


def as_token_ids(ids: Any, name: str, count: int) -> list[int]:
    """The ids of an argument as a list. Raises UserError unless they are integers from 0 to `count` - 1."""
    try:
        tokens = list(ids)
        numbers = [operator.index(token) for token in tokens]
    except TypeError:
        raise UserError(f"{name} is {str(ids)[:60]!r}; a sequence of token ids is expected") from None
    for token, number in zip(tokens, numbers, strict=True):
        if isinstance(token, bool) or not 0 <= number < count:
            raise UserError(f"{name} has {_shown(token)}; token ids from 0 to {count - 1} are expected")
    return numbers


def as_path(value: Any, name: str, written: bool = False) -> Path:
    """The path that a string or a `Path` names, with "~" expanded.

    Args:
        value: the argument.
        name: the argument in error messages.
        written: whether files will be written in the folder: it must be a folder, or its closest existing parent must be a
            folder that this process may write to.

    Raises:
        UserError: the value is no string or path, is empty or too long, or nothing can be written there.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise UserError(f"{name} is {_shown(value)} ({type(value).__name__}); the path of a folder, a string or a "
                        "pathlib.Path, is expected")
    try:
        path = Path(os.fsdecode(os.fsencode(text))).expanduser()  # Raises for text that no file name can have.
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name} is {_shown(value)}, which cannot be used ({reason}); give the path of a folder") from None
    if written and not existing.is_dir():
        raise UserError(f"{name} is {_shown(value)}, but {existing} is a file; give the path of a folder")
    if written and not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name} is {_shown(value)}, but {existing} cannot be written; give another folder")
    return path


def make_folder(path: Path, name: str) -> None:
    """Creates a folder with its parents. Raises UserError if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name} is {str(path)!r}, which cannot be created ({error.strerror}); give another folder") from None


def _shown(value: Any) -> str:
    """The start of a value's representation."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def section_from(default: Any, fields: Mapping[str, Any], caller: str, objects: Mapping[str, Any] | None = None) -> Any:
    """Builds a section of the config from keyword arguments and checks it as a run does.

    Args:
        default: the section that provides the fields not given.
        fields: values by field name. A nested section is a mapping or an instance of its class.
        caller: the function or class that error messages name; they call the argument CALLER.FIELD.
        objects: objects that replace nested sections, by field name, such as an optimizer.

    Raises:
        UserError: a field does not exist, its value is not valid, or it has no effect with the other values.
    """
    section = dataclasses.replace(schema.from_mapping(default, fields, caller), **(objects or {}))
    name = next((name for name, kind in schema.field_types(Config).items() if kind is type(default)), None)
    if name is None:
        return section
    # The caller provides the model and the data, so the config must not restrict them.
    config = Config()
    model = dataclasses.replace(config.model, max_length=2**31 - 1)
    data = dataclasses.replace(config.data, source="preferences_jsonl")
    config = dataclasses.replace(config, stages=(), model=model, data=data, **{name: section})
    try:
        _refuse_unread(section, default, name, config)
        section.check(config, name)
        for batch in STAGES.get(name).batches if name in STAGES else ():
            check_batch(config, STAGES.get(name), batch)
    except UserError as error:
        named = re.sub(rf"\b(?:config\.)?{name}\.(?=\w)", f"{caller}.", str(error))
        raise UserError(named) from None
    return section


def _refuse_unread(section: Any, usual: Any, name: str, config: Config) -> None:
    refuse_unread(section, usual, name, lambda dotted: schema.get(config, dotted))
    for inner in schema.field_types(type(section)):
        if dataclasses.is_dataclass(getattr(section, inner)):
            _refuse_unread(getattr(section, inner), getattr(usual, inner), f"{name}.{inner}", config)
