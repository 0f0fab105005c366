"""Registries of records that a config selects by name, built-in or custom. This module does not import JAX."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxalign.errors import UserError


def names_in(selector: str) -> tuple[str, ...]:
    """The names in a sum, in order: `preference+callable` gives ("preference", "callable")."""
    return tuple(selector.split("+"))


class Record:
    """The base of the entries of registries: frozen dataclasses with a name.

    A field with a function holds the function, or "module:attribute" of it, which is imported on first use.
    """

    name: str
    _where = "the {part} of {name!r}"
    """A field of the record in error messages."""

    def load(self, part: str = "") -> Any:
        """The value of a field, imported if it is a string; None stays None.

        Args:
          part: the field; by default the second one, after the name.

        Raises:
          UserError: the module cannot be imported or has no such attribute.
        """
        part = part or dataclasses.fields(self)[1].name
        value = getattr(self, part)
        return load_object(value, self._where.format(part=part, name=self.name)) if isinstance(value, str) else value

    def _require_reads(self) -> None:
        """Raises UserError unless `reads` is a tuple of names."""
        if not isinstance(self.reads, tuple) or not all(isinstance(name, str) for name in self.reads):
            where = self._where.format(part="reads", name=self.name)
            raise UserError(f"{where} is {self.reads!r}; a tuple of field names, such as ('gamma',), is expected")


R = TypeVar("R", bound=Record)
T = TypeVar("T")


class Registry(Generic[R]):
    """Records of one kind by name.

    A name is looked up in this order: among the built-in records, the records added with `register`, the entry points of the
    kind's group (such as "jaxalign.advantage_estimators"), and then as "package.module:attribute" or "FILE.py:attribute". An
    entry point or attribute must be a record of this registry's type.

    Args:
      kind: the noun for error messages, such as "advantage estimator".
      record: the type of the records.
      builtin: the records of the package, in the order in which messages and documentation list them; or a function that
        returns them, called on first use.
    """

    def __init__(self, kind: str, record: type[R], builtin: Iterable[R] | Callable[[], Iterable[R]] = ()):
        self.kind, self.record = kind, record
        # "model family" gives jaxalign.model_families.
        plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}es" if kind.endswith("s") else f"{kind}s"
        self.group = f"jaxalign.{plural.replace(' ', '_')}"
        self._given = builtin
        self._own: dict[str, R] = {}

    @functools.cached_property
    def builtin(self) -> dict[str, R]:
        """The built-in records by name, in their order."""
        records = self._given() if callable(self._given) else self._given
        return {record.name: record for record in records}

    def declare(self, name: str, **properties: Any) -> Callable[[T], T]:
        """Declares the decorated function or class as a built-in record; `declarations.declared` reads its arguments.

        Only for modules of this package that the registry lists. Custom parts are records added with `register`, or named by
        their location.

        Args:
          name: the name of the record.
          properties: its other fields.

        Raises:
          ValueError: the registry does not list the module.
        """
        def check(part: T) -> T:
            if name not in self.builtin:
                raise ValueError(f"{part.__module__} declares the {self.kind} {name!r}, but its registry does not list the "
                                 "module; add the module to the list in jaxalign.registry")
            return part

        return check

    def register(self, record: R) -> R:
        """Adds a record under its own name and returns it.

        Raises:
          UserError: the record has the wrong type, its name is not valid, or a different record has the same name.
        """
        self._require(record, repr(record))
        if not isinstance(record.name, str) or not record.name or set(record.name) & set(":+, "):
            raise UserError(f"the name of a registered {self.kind} is {record.name!r}; a non-empty string without ':', '+', "
                            "',' or spaces is expected")
        known = self.builtin.get(record.name) or self._own.get(record.name)
        if known is not None and known != record:
            remedy = "" if record.name in self.builtin else f", or call unregister({record.name!r}) of its registry first"
            raise UserError(f"the {self.kind} {record.name!r} is already registered; choose another name{remedy}")
        self._own[record.name] = record
        return record

    def name_of(self, given: Any) -> Any:
        """Registers a record that a caller gave in place of a name and returns its name; returns other values unchanged.

        If another record has the name, a number is added to it, since a notebook may define a record again.
        """
        if not isinstance(given, self.record):
            return given
        record, number = given, 1
        while self.builtin.get(record.name, self._own.get(record.name, record)) != record:
            number += 1
            record = dataclasses.replace(given, name=f"{given.name}-{number}")
        return self.register(record).name

    def unregister(self, name: str) -> None:
        """Removes a record that `register` added; does nothing if there is none."""
        self._own.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """The names of built-in records, registered records and entry points, in this order."""
        return tuple(dict.fromkeys((*self.builtin, *self._own, *self._entry_points())))

    def get(self, name: str, where: str = "") -> R:
        """The record with this name.

        Args:
          name: a registered name, "package.module:attribute" or "FILE.py:attribute".
          where: the config field or argument with the name, for error messages.

        Raises:
          UserError: there is no record with this name, its module cannot be imported, or the object is not a record of this
            registry's type.
        """
        if not isinstance(name, str):
            raise UserError(f"{where or f'the name of the {self.kind}'} is {name!r:.80} of type {type(name).__name__}; a "
                            "string is expected")
        record = self.builtin.get(name) or self._own.get(name)
        if record is not None:
            return record
        if name in self._entry_points():
            return self._require(load_object(self._entry_points()[name].value, where or self.kind), f"entry point {name!r}")
        if ":" in name:
            return self._require(load_object(name, where or self.kind), name, where)
        said = f"{where} is {name!r}" if where else f"{name!r} is not a known {self.kind}"
        own = "'package.module:name'"
        wanted = f"one of {', '.join(self.names())}, or {own} of your own," if self.names() else own
        near = difflib.get_close_matches(name, self.names(), n=1)
        raise UserError(f"{said}; {wanted} is expected" + (f"; did you mean {near[0]}?" if near else ""))

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[R]:
        return (self.get(name) for name in self.names())

    @functools.cache  # noqa: B019 (a registry lives as long as the process)
    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        points: dict[str, importlib.metadata.EntryPoint] = {}
        for point in importlib.metadata.entry_points(group=self.group):
            if point.name in self.builtin or point.name in points:
                raise UserError(f"two packages register the {self.kind} {point.name!r} ({point.value}); uninstall one of them")
            points[point.name] = point
        return points

    def _require(self, record: Any, name: str, where: str = "") -> R:
        """The record itself. Raises UserError if it is of another type."""
        if not isinstance(record, self.record):
            said = f"{where} is {name!r}, which" if where else name
            raise UserError(f"{said} is of type {type(record).__name__}; a jaxalign {self.record.__name__} is expected")
        return record


def maker_record(registry: Registry[R], name: str, where: str, methods: tuple[str, ...], expected: str) -> R:
    """The registered record with this name, or a record for the class or function at "package.module:name" or "FILE.py:name".

    Args:
      registry: its records have a name and a maker, which `load` returns.
      name: the name or location.
      where: the config field or argument with the name, for error messages.
      methods: the methods that a class must have.
      expected: completes the error message: "EXPECTED is expected".

    Raises:
      UserError: there is no such record or object, its module cannot be imported, or it is neither a function nor such a class.
    """
    if name in registry or ":" not in name:
        return registry.get(name, where)
    value = load_object(name, where)
    record = value if isinstance(value, registry.record) else registry.record(name, value)
    make = record.load()
    if not callable(make) or (isinstance(make, type) and not has_methods(make, methods)):
        raise UserError(f"{where} names {name!r}, which is not a {registry.kind}; {expected} is expected")
    return record


def has_methods(value: Any, methods: tuple[str, ...]) -> bool:
    """Whether an object or class has all of these methods."""
    return all(callable(getattr(value, method, None)) for method in methods)


def load_object(spec: str, where: str) -> Any:
    """The object at "package.module:attribute" or "FILE.py:attribute".

    A file runs once, and again if its text changes.

    Args:
      spec: the location.
      where: the config field or argument with the location, for error messages.

    Raises:
      UserError: `spec` is malformed, the module or file cannot be imported, or it has no such attribute.
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{where} is {spec!r}; 'package.module:name' or 'FILE.py:name' is expected")
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except UserError as error:
        raise UserError(f"{where} is {spec!r}: {error}") from error
    except (Exception, SystemExit) as error:  # The user's module may raise anything.
        # The module itself may be missing, or a module that it imports.
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}.")
        hint = "; install it, put its folder on PYTHONPATH, or name a file that ends in .py" if missing else ""
        raise UserError(f"{where} is {spec!r}: {place} cannot be imported ({type(error).__name__}: {error}){hint}") from error
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [name for name in dir(value) if not name.startswith("_")], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{where} is {spec!r}, but {place} has no {attribute}{hint}")
        value = getattr(value, part)
    return value


_FILES: dict[Path, tuple[bytes, Any]] = {}
"""The text and the module of each loaded file."""


def _load_file(place: str) -> Any:
    path = Path(place).expanduser().resolve()
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}")
    text = path.read_bytes()
    if path in _FILES and _FILES[path][0] == text:
        return _FILES[path][1]
    name = f"jaxalign_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    before, sys.modules[name] = sys.modules.get(name), module  # Dataclasses and pickle look modules up by name.
    try:
        exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    _FILES[path] = text, module
    return module
