"""The trackers that record metrics."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.trackers import tracker_record


@dataclasses.dataclass(frozen=True)
class TrackingConfig(Section):
    """Trackers of training metrics, in addition to each stage's metrics.jsonl."""

    trackers: tuple[str, ...] = field((), "Trackers that receive the metrics of every step: registered names, or "
                                      "'package.module:name' or 'FILE.py:name' of a class with methods start, log and finish.")

    def check(self, config: WholeConfig, name: str) -> None:
        for tracker in self.trackers:
            tracker_record(tracker, "config.tracking.trackers")
            if self.trackers.count(tracker) > 1:
                raise UserError(f"config.tracking.trackers names {tracker!r} twice; name each tracker once")
