"""Trackers: the records that `config.tracking.trackers` selects from. Trackers receive the metrics of every training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.registry.core import Record, Registry, maker_record

_METHODS = ("start", "log", "finish")


@dataclasses.dataclass(frozen=True)
class TrackerRecord(Record):
    """A kind of tracker.

    Attributes:
      name: its name in the config.
      make: a class, or a function without arguments that returns a tracker; or "module:attribute" of either, imported on
        first use. A tracker has the methods of `jaxalign.tracking.tracker.Tracker`. Each training loop gets its own tracker.
    """

    name: str
    make: Callable[[], Any] | str
    _where = "{part} of tracker {name!r}"


TRACKERS = Registry("tracker", TrackerRecord, (
    TrackerRecord("tensorboard", "jaxalign.tracking.sinks.tensorboard:TensorBoard"),
    TrackerRecord("wandb", "jaxalign.tracking.sinks.wandb:WandB"),
    TrackerRecord("mlflow", "jaxalign.tracking.sinks.mlflow:MLflow"),
    TrackerRecord("trackio", "jaxalign.tracking.sinks.trackio:Trackio"),
))
"""The metric files are always written and need no name."""


def tracker_record(name: str, where: str) -> TrackerRecord:
    """The registered record with this name, or a record for the class or function at "package.module:name" or "FILE.py:name".

    Args:
      name: the name or location.
      where: the field with the name, for error messages.

    Raises:
      UserError: there is no such record or object, its module cannot be imported, or it cannot create a tracker.
    """
    return maker_record(TRACKERS, name, where, _METHODS, "a class with the methods start(config), log(step, metrics) and "
                        "finish(status), or a function that returns such an object,")
