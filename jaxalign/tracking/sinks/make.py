"""Makes trackers from their names, for the Python API."""

from __future__ import annotations

from typing import Any

from jaxalign.config import TrackingConfig
from jaxalign.config.arguments import section_from
from jaxalign.errors import UserError
from jaxalign.registry.trackers import TRACKERS, tracker_record
from jaxalign.tracking.sinks.base import Sink


def tracker(name: str, **settings: Any) -> Any:
    """A tracker for the argument `trackers` of a trainer, such as `tracker("wandb", project="stories")`.

    Args:
      name: tensorboard, wandb, mlflow or trackio, or another name or location as in `config.tracking.trackers`.
      settings: fields of `config.tracking`, such as project, group, directory and tags; only for the trackers of the package.

    Returns:
      An object with the methods start(config), log(step, metrics) and finish(status), for one run.

    Raises:
      UserError: there is no such tracker, or a setting is unknown, not valid, or contains a key.
    """
    return make_tracker(name, "tracker(name)", **settings)


def make_tracker(name: str, where: str, **settings: Any) -> Any:
    """Like `tracker`. where: the argument with the name, for error messages."""
    make = tracker_record(name, where).load()
    if isinstance(make, type) and issubclass(make, Sink):
        return make(section_from(TrackingConfig(trackers=(name,)), settings, "tracker"))
    if settings:
        raise UserError(f"{where} is {name!r}, which takes no settings; {', '.join(TRACKERS.builtin)} do")
    return make()
