"""Parses fields set on the command line, such as `--config.ppo.kl_coef=0.1`, in every spelling, against the schema."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Sequence
from typing import Any

from jaxalign.config import schema
from jaxalign.config.schema import unknown_name
from jaxalign.errors import UserError

_OVERRIDE = re.compile(r"--?(?P<no>no)?config\.(?P<name>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)


def normalise(arguments: Sequence[str], default: Any) -> list[str]:
    """Rewrites every override to the form --config.FIELD=VALUE. Other arguments do not change.

    Args:
        arguments: the command line without the program's name.
        default: the default config, including the sections of custom stages.

    Raises:
        UserError: a field does not exist or has no value.
    """
    result: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        match = _OVERRIDE.fullmatch(argument)
        if match is None:
            result.append(argument)
            continue
        name, value = match["name"], match["value"]
        kind = _field_type(name, default)
        if kind in (bool, bool | None) and value is None:
            value = "False" if match["no"] else "True"
        elif match["no"]:
            raise UserError(f"{argument} is only valid for a bool, but config.{name} is {schema.type_name(kind)}; "
                            f"set it with --config.{name}=VALUE")
        value = next(waiting, None) if value is None else value
        if value is None:
            raise UserError(f"--config.{name} has no value; set it with --config.{name}=VALUE")
        flag = f"--config.{name}="
        # If a field is given twice, the last value counts. The flags library would concatenate tuples.
        result = [other for other in result if not other.startswith(flag)]
        result.append(flag + _literal_of(value, kind))
    return result


def stages_given(arguments: Sequence[str]) -> tuple[str, ...]:
    """The stages that the command line sets, in any spelling; empty if it sets none."""
    stages = ""
    for argument, following in itertools.pairwise([*arguments, ""]):
        match = _OVERRIDE.fullmatch(argument)
        if match is not None and match["name"] == "stages":
            stages = following if match["value"] is None else match["value"]
    return tuple(part.strip(" '\"()[]") for part in stages.split(",") if part.strip(" '\"()[]"))


def _literal_of(value: str, kind: Any) -> str:
    """A tuple's entries as a Python literal; any other value unchanged."""
    if typing.get_origin(kind) is not tuple or value.startswith(("(", "[")):
        return value
    literals = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        try:
            float(entry)
            is_number = typing.get_args(kind)[0] is not str
        except ValueError:
            is_number = False
        literals.append(entry if is_number else repr(entry))
    return f"({', '.join(literals)},)" if literals else "()"


def _field_type(name: str, default: Any) -> Any:
    """The schema's type of a field. Raises UserError if the field does not exist or is a section."""
    try:
        value = schema.get(default, name)
    except KeyError:
        raise UserError(unknown_name(default, f"config.{name}")) from None
    if dataclasses.is_dataclass(value):
        some = next(iter(schema.field_types(type(value))))
        raise UserError(f"config.{name} is a section; set its fields individually, such as --config.{name}.{some}=VALUE")
    owner = schema.get(default, name.rpartition(".")[0]) if "." in name else default
    return schema.field_types(type(owner))[name.rpartition(".")[2]]
