"""The reference page of the config, written from the schema so that it cannot fall behind it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from jaxalign.config.schema import field_types, is_section, type_name

_HEAD = """# Config reference

Written by `python -m jaxalign.config > docs/config.md`; do not edit by hand.

A config file is a Python file whose `get_config()` returns `jaxalign.config.default_config()` with changes.
Any field can also be set on the command line: `python -m jaxalign.train --config=FILE --config.ppo.kl_coef=0.1`.
"""


def markdown(config: Any) -> str:
    """The page: one table a section, in the schema's order, with the defaults that `config` holds."""
    return "\n".join([_HEAD, *_section(config, "config")]) + "\n"


def _section(instance: Any, path: str, doc: str = "") -> list[str]:
    kinds = field_types(type(instance))
    docs = {entry.name: entry.metadata for entry in dataclasses.fields(instance)}
    lines = [f"## {path}", "", f"{doc} {inspect.cleandoc(type(instance).__doc__)}".strip(), "",
             "| field | type | default | meaning |", "|---|---|---|---|"]
    inner = []
    for name, kind in kinds.items():
        value, meta = getattr(instance, name), docs[name]
        if is_section(kind):
            inner.append((value, f"{path}.{name}", meta["doc"]))
            continue
        check = f" Must be {meta['check'].text}." if meta["check"] else ""
        lines.append(f"| `{name}` | {type_name(kind)} | {_default(value)} | {meta['doc']}{check} |")
    for value, inner_path, doc in inner:
        lines += ["", *_section(value, inner_path, doc)]
    return lines


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value) or "`()`"
    return f"`{value!r}`"
