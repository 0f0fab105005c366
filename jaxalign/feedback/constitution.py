"""Constitutions: the principles that guide critiques, revisions and labels, read from JSON or text files.

These formats are supported:

* a .txt file: each line is a principle, such as "Be brief.", from which its requests are built. Blank lines, lines that begin
  with "#", and the marks of lists ("-", "*", "1.") are left out;
* this project's: `{"name": ..., "principles": [{"name", "critique_request", "revision_request", "comparison"}, ...]}`, where a
  text in place of an object is a principle as in a .txt file;
* that of the Constitutional AI paper's repository: `{"harmful0": {"prompt": ["... CritiqueRequest: ... Critique:"],
  "edit_request": "... RevisionRequest: ... Revision:"}, ...}` (Bai et al. 2022, arXiv 2212.08073);
* the common public one: `{"constitutions": [{"critic", "revision"}, ...], "system_chat": [...]}`.

"system_chat" has examples of critique and revision, which a template set may show to the judge; any format may have it.

The public formats have no question for comparing two answers; it is derived from the critique request.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxalign.config.arguments import as_path, as_text
from jaxalign.data.chat.requests import parse_exemplars
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.records import Exemplar, Principle

_SHAPES = 'jaxalign\'s own ("principles"), the paper\'s ("prompt" and "edit_request") and the public one ("constitutions")'
_FIELDS = ("name", "critique_request", "revision_request", "comparison")
_COMPARISON = "Which of the two answers fares better under this request? "
_LIST_MARK = re.compile(r"^(?:[-*\u2022]|\d+[.)])\s+")
_LABELS = re.compile(r"(?:CritiqueRequest|RevisionRequest|Critique|Revision):")


class Constitution(tuple[Principle, ...]):
    """The principles of a constitution.

    Args:
        source: the name of a constitution in the package ("default", "courtesy"), the path of a JSON or .txt file, or a list
            whose entries are `Principle`s, mappings with their fields, or texts such as "Be brief.", from which the three
            requests are built.

    Raises:
        UserError: see `load_constitution`; or an entry of the list is malformed.
    """

    exemplars: tuple[Exemplar, ...] = ()
    """The examples of critique and revision in the file, if any."""

    def __new__(cls, source: str | Path | Sequence[Any] = "default") -> Constitution:
        if isinstance(source, str | Path):
            constitution = super().__new__(cls, load_constitution(source))
            constitution.exemplars = load_exemplars(source)
            return constitution
        if not isinstance(source, Sequence) or not source:
            raise UserError(f"the constitution is {source!r}; a name, a file, or a list of at least one principle is expected")
        return super().__new__(cls, _unique("given", tuple(_given(i, entry) for i, entry in enumerate(source))))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each principle."""
        return tuple(principle.name for principle in self)


def load_constitution(path_or_name: str | Path) -> tuple[Principle, ...]:
    """Reads the principles of a constitution.

    Args:
        path_or_name: the name of a constitution in the package ("default", "courtesy"), or the path of a JSON file or of a
            .txt file with one text per line.

    Returns:
        Its principles, in the file's order; their names are unique.

    Raises:
        UserError: the file does not exist, is not JSON, has an unknown format, lacks a field, or has no principle.
    """
    source, data = _read(path_or_name)
    principles = _parse(source, data)
    if not principles:
        raise UserError(f"constitution {source} has no principles; at least one is needed")
    return _unique(source, principles)


def load_exemplars(path_or_name: str | Path) -> tuple[Exemplar, ...]:
    """The examples of critique and revision in a constitution's file; empty if it has none. Raises: see `load_constitution`."""
    source, data = _read(path_or_name)
    return parse_exemplars(data.get("system_chat") or [], f"constitution {source}")


def _unique(source: str, principles: tuple[Principle, ...]) -> tuple[Principle, ...]:
    names = [principle.name for principle in principles]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"constitution {source} names {repeated[0]!r} more than once; give each principle its own name")
    return principles


def _given(index: int, entry: Any) -> Principle:
    """A principle from an entry of a Python list."""
    if isinstance(entry, Principle):
        return entry
    if isinstance(entry, Mapping):
        return _listed("given", index, dict(entry))
    if isinstance(entry, str):
        as_text(entry, f"principle {index + 1} of the constitution")
    if not isinstance(entry, str) or not entry.strip():
        raise UserError(f"principle {index + 1} of the constitution is {entry!r}; a string, a Principle or a mapping with the "
                        f"fields {', '.join(_FIELDS)} is expected")
    rule = entry.strip()
    return Principle(
        f"principle-{index + 1}",
        f"Point out where the answer breaks this principle: {rule}",
        f"Rewrite the answer so that it follows this principle: {rule}",
        f"Which of the two answers follows this principle better? {rule}",
    )


def builtin_names() -> tuple[str, ...]:
    """The names of the constitutions that come with the package."""
    folder = resources.files("jaxalign.feedback") / "constitutions"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def _read(path_or_name: str | Path) -> tuple[str, dict[str, Any]]:
    """(the constitution's name, the object in its file)."""
    name = str(path_or_name) if str(path_or_name) in builtin_names() else str(as_path(path_or_name, "the constitution"))
    text = _read_text(name)
    if name.lower().endswith(".txt") and text.lstrip()[:1] not in ("{", "["):
        lines = [_LIST_MARK.sub("", line.strip()) for line in text.split("\n") if not line.lstrip().startswith("#")]
        return name, {"principles": [line for line in lines if line]}
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}: {error.msg}"
        raise UserError(f"constitution {name} is not JSON ({where}); correct that line, or give a .txt file with one principle "
                        "on each line") from error
    if not isinstance(data, dict):
        raise UserError(f"constitution {name} is a {type(data).__name__}; the known formats are {_SHAPES}")
    return name, data


def _read_text(name: str) -> str:
    if name in builtin_names():
        return (resources.files("jaxalign.feedback") / "constitutions" / f"{name}.json").read_text("utf-8")
    path = Path(name)
    if not os.path.isfile(path):
        raise UserError(
            f"constitution {name} does not exist; give the path of a JSON or .txt file, or one of: {', '.join(builtin_names())}"
        )
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"constitution {name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _parse(source: str, data: dict[str, Any]) -> tuple[Principle, ...]:
    for key in ("principles", "constitutions"):
        if key in data:
            if not isinstance(data[key], list):
                raise UserError(f'"{key}" of constitution {source} is a {type(data[key]).__name__}; expected a list of objects')
            return tuple(_listed(source, i, entry, key == "constitutions") for i, entry in enumerate(data[key]))
    data = {name: entry for name, entry in data.items() if name != "system_chat"}
    if all(isinstance(entry, dict) and "edit_request" in entry for entry in data.values()):
        return tuple(_paper(source, name, entry) for name, entry in data.items())
    raise UserError(f"constitution {source} has an unknown format; the known formats are {_SHAPES}")


def _listed(source: str, index: int, entry: Any, public: bool = False) -> Principle:
    """A principle in a list: in this project's format, or in the common public one."""
    where = f"principle {index + 1} of constitution {source}"
    if isinstance(entry, str) and not public:
        return _given(index, entry)
    if not public:
        return Principle(**{field: _field(where, entry, field) for field in _FIELDS})
    critique, revision = _field(where, entry, "critic"), _field(where, entry, "revision")
    return Principle(f"principle-{index + 1}", critique, revision, _COMPARISON + critique)


def _paper(source: str, name: str, entry: Any) -> Principle:
    where = f"principle {name!r} of constitution {source}"
    prompt = entry.get("prompt")
    if isinstance(prompt, list) and prompt:
        # If several equivalent wordings are listed, use the first.
        prompt = prompt[0]
    requests = (_field(where, {"prompt": prompt}, "prompt"), _field(where, entry, "edit_request"))
    critique, revision = (_LABELS.sub("", request).strip() for request in requests)
    if not critique or not revision:
        raise UserError(f"{where} has a request without text; write the request after its label")
    return Principle(name, critique, revision, _COMPARISON + critique)


def _field(where: str, entry: Any, field: str) -> str:
    """The text in a field of an entry, without surrounding spaces. Raises UserError if there is none."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is a {type(entry).__name__}; expected an object")
    value = entry.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'{where} has no text in "{field}"; write one')
    return value.strip()
