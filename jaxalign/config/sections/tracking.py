"""The trackers that record metrics, and what a run writes for those who watch it."""

from __future__ import annotations

import dataclasses
import re

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least
from jaxalign.config.reading import unless
from jaxalign.config.schema import field
from jaxalign.config.secrets import secret_in
from jaxalign.errors import UserError
from jaxalign.registry.trackers import tracker_record

_TRACKED = unless("trackers", (), "to the name of a tracker")


@dataclasses.dataclass(frozen=True)
class TrackingConfig(Section):
    """Trackers of training metrics, in addition to each stage's metrics.jsonl (docs/tracking.md), and what a run writes for
    those who watch it (docs/watching.md)."""

    trackers: tuple[str, ...] = field((), "Trackers that receive the metrics of every step: tensorboard, wandb, mlflow, "
                                      "trackio, other registered names, or 'package.module:name' or 'FILE.py:name' of a class "
                                      "with methods start, log and finish.")
    project: str = field("jaxalign", "Project of wandb and trackio, and experiment of mlflow.", None, _TRACKED)
    group: str = field("", "Group of the runs of all stages; empty: the name of the work directory.", None, _TRACKED)
    directory: str = field("", "Folder of the trackers' local files; empty: trackers in the work directory.", None, _TRACKED)
    tags: tuple[str, ...] = field((), "Tags of the runs.", None, _TRACKED)
    samples: int = field(16, "Number of rows in the table of samples that a stage with generated rows sends at its end; 0: no "
                         "table.", at_least(0), _TRACKED)
    system_seconds: float = field(10.0, "Seconds between two rows of WORKDIR/system.jsonl: load, memory, disk, device memory "
                                  "and the stage's progress. 0: only a last row, if the run fails or is interrupted.",
                                  at_least(0))
    live_report_seconds: float = field(60.0, "Seconds between two versions of report.html while the run goes on, if stage "
                                       "report is planned; at most 1% of the time is spent on it. 0: only the report at the "
                                       "end.", at_least(0))
    webhook: str = field("", "The name of an environment variable with a URL to which alerts and the end of the run are posted "
                         "as JSON; empty: none. The URL, which may be secret, is in no file of the run.")

    def check(self, config: WholeConfig, name: str) -> None:
        """Refuses secrets, unknown trackers, and trackers that are named twice."""
        check_no_secrets(self, f"config.{name}.")
        if not self.project.strip():
            raise UserError(f"config.{name}.project is empty; set it to the name of a project")
        for tracker in self.trackers:
            tracker_record(tracker, "config.tracking.trackers")
            if self.trackers.count(tracker) > 1:
                raise UserError(f"config.tracking.trackers names {tracker!r} twice; name each tracker once")
        if self.webhook and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.webhook):  # The value may be a secret URL.
            raise UserError("config.tracking.webhook must be the name of an environment variable, such as JAXALIGN_WEBHOOK; "
                            "put the URL into that variable")


def check_no_secrets(section: TrackingConfig, prefix: str) -> None:
    """Raises UserError, which does not repeat the value, if a field contains a secret. prefix: of the field's name."""
    for field_name, value in vars(section).items():
        for text in value if isinstance(value, tuple) else (value,):
            secret = secret_in(text) if isinstance(text, str) else ""
            if secret:
                raise UserError(f"{prefix}{field_name} contains {secret}, which the files of the run would store; remove it, "
                                "and give keys only in the environment variables of the tracker's service (docs/tracking.md)")
