"""The error message for a dotted name that is not a field, with the most likely field."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from jaxalign.errors import shown


def unknown_name(root: Any, path: str) -> str:
    """The error message for a dotted name that is not a field.

    It suggests the most similar field of the same section or of a nested section, else a field with that name elsewhere.

    Args:
        root: the whole config.
        path: the full name; the part before its first dot is the name of the config.
    """
    path = shown(path)
    top, *parts = path.split(".")
    here = root
    for depth, part in enumerate(parts):
        names = [entry.name for entry in dataclasses.fields(here)]
        if part not in names:
            break
        here = getattr(here, part)
        if not dataclasses.is_dataclass(here):
            return f"{path} is not a field: {'.'.join([top, *parts[:depth + 1]])} is a value, not a section"
    owner, wrong, wanted = (parts[depth - 1] if depth else top), ".".join([top, *parts[:depth + 1]]), parts[-1]
    section = wrong.rsplit(".", 1)[0]
    sentence = f"{wrong} is not a field of {owner}"
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
    # The field may be in a nested section. Prefer an equally similar field of the same section.
    below = [name for name in _flat_names(here) if "." in name] if depth + 1 == len(parts) else []
    best = max(below, key=lambda name: _likeness(name, part), default="")
    if best and _likeness(best, part) > max(0.8, _likeness(near[0], part) if near else 0):
        return f"{sentence}; did you mean {section}.{best}?"
    if near:
        return f"{sentence}; did you mean {near[0]}?"
    # No name is similar, so this may be a field of another section.
    same = [f"{top}.{name}" for name in _flat_names(root) if name.rsplit(".", 1)[-1] == wanted]
    inside = [full for full in same if full.startswith(f"{section}.")]
    if same:
        return f"{sentence}; did you mean {(inside or same)[0]}?"
    return f"{sentence}; its fields are {', '.join(names)}"


def _flat_names(section: Any, prefix: str = "") -> list[str]:
    """The dotted names of all values inside a section."""
    names = []
    for entry in dataclasses.fields(section):
        value, name = getattr(section, entry.name), f"{prefix}{entry.name}"
        names += _flat_names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return names


def _likeness(name: str, wanted: str) -> float:
    """The similarity of the last part of a dotted name to a wanted name, from 0 to 1."""
    return difflib.SequenceMatcher(None, name.rsplit(".", 1)[-1], wanted).ratio()
