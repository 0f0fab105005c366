"""Builds sections from keyword arguments, for the Python API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxalign.config import schema
from jaxalign.config.reading import refuse_unread
from jaxalign.config.root import Config
from jaxalign.errors import UserError


def section_from(default: Any, fields: Mapping[str, Any], caller: str) -> Any:
    """Builds a section of the config from keyword arguments and checks it as a run does.

    Args:
        default: the section that provides the fields not given.
        fields: values by field name. A nested section is a mapping or an instance of its class.
        caller: the function or class that error messages name; they call the argument CALLER.FIELD.

    Raises:
        UserError: a field does not exist, its value is not valid, or it has no effect with the other values.
    """
    section = schema.from_mapping(default, fields, caller)
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
    except UserError as error:
        raise UserError(str(error).replace(f"config.{name}.", f"{caller}.")) from None
    return section


def _refuse_unread(section: Any, usual: Any, name: str, config: Config) -> None:
    refuse_unread(section, usual, name, lambda dotted: schema.get(config, dotted))
    for inner, kind in schema.field_types(type(section)).items():
        if dataclasses.is_dataclass(kind):
            _refuse_unread(getattr(section, inner), getattr(usual, inner), f"{name}.{inner}", config)
