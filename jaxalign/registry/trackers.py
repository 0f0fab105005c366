"""Trackers: what `config.tracking.trackers` names. They receive the metrics of every training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, load_object

_METHODS = ("start", "log", "finish")


@dataclasses.dataclass(frozen=True)
class TrackerRecord:
    """A kind of tracker.

    Attributes:
      name: its name in the config.
      make: a class or function that makes one without arguments, or "module:attribute" of it, imported when it is first used.
        What it makes has the methods of `jaxalign.tracking.tracker.Tracker`. One is made for each training loop.
    """

    name: str
    make: Callable[[], Any] | str

    def load(self) -> Callable[[], Any]:
        """The class or function itself."""
        if isinstance(self.make, str):
            return load_object(self.make, f"the maker of tracker {self.name!r}")
        return self.make


TRACKERS = Registry("tracker", TrackerRecord)
"""Empty as delivered: the metric files are always written and need no name."""


def tracker_record(name: str, where: str) -> TrackerRecord:
    """The registered record of that name, or one for the class or function at "package.module:name" or "FILE.py:name".

    Raises:
      UserError: there is none, its module cannot be imported, or it can make no tracker; `where` is the field that names it.
    """
    if name in TRACKERS or ":" not in name:
        return TRACKERS.get(name, where)
    found = load_object(name, where)
    record = found if isinstance(found, TrackerRecord) else TrackerRecord(name, found)
    make = record.load()
    if not callable(make) or (isinstance(make, type) and not all(callable(getattr(make, method, None)) for method in _METHODS)):
        raise UserError(f"{where} names {name!r}, which is no tracker; a class with the methods start(config), "
                        "log(step, metrics) and finish(status), or a function that makes such an object, is expected")
    return record
