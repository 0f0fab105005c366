"""Trackers: the records that `config.tracking.trackers` selects from. Trackers receive the metrics of every training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.registry.core import Registry, load_object, maker_record

_METHODS = ("start", "log", "finish")


@dataclasses.dataclass(frozen=True)
class TrackerRecord:
    """A kind of tracker.

    Attributes:
      name: its name in the config.
      make: a class, or a function without arguments that returns a tracker; or "module:attribute" of either, imported on
        first use. A tracker has the methods of `jaxalign.tracking.tracker.Tracker`. Each training loop gets its own tracker.
    """

    name: str
    make: Callable[[], Any] | str

    def load(self) -> Callable[[], Any]:
        """The class or function, imported if it is named."""
        if isinstance(self.make, str):
            return load_object(self.make, f"make of tracker {self.name!r}")
        return self.make


TRACKERS = Registry("tracker", TrackerRecord)
"""Has no built-in records: the metric files are always written and need no name."""


def tracker_record(name: str, where: str) -> TrackerRecord:
    """The registered record with this name, or a record for the class or function at "package.module:name" or "FILE.py:name".

    Args:
      name: the name or location.
      where: the field with the name, for error messages.

    Raises:
      UserError: there is no such record or object, its module cannot be imported, or it cannot create a tracker.
    """
    return maker_record(TRACKERS, name, where, is_tracker, "a class with the methods start(config), log(step, metrics) and "
                        "finish(status), or a function that returns such an object,")


def is_tracker(found: Any) -> bool:
    """Whether an object or class has the methods of a tracker."""
    return all(callable(getattr(found, method, None)) for method in _METHODS)
