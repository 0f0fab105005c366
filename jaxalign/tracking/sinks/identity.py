"""The identity of a tracked run: one for each folder of a work directory, stored in it, so that a resume continues the run."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import TrackingConfig
from jaxalign.json_text import parse_json
from jaxalign.storage import write_atomically

FILE = "tracker_run.json"
"""The file of the identity in the folder of a stage; not an output of the stage."""


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """A run as the trackers know it.

    Attributes:
      id: 16 hexadecimal digits, drawn when the folder was first tracked.
      group: the group of the runs of one work directory.
      stage: the folder within the work directory, such as "ppo" or "round-2/ppo".
      files: the folder of the trackers' local files.
    """

    id: str
    group: str
    stage: str
    files: Path

    @property
    def name(self) -> str:
        """The name of the run, unique also among work directories of the same name."""
        return f"{self.group}/{self.stage}-{self.id[:6]}"


def identify(config: Mapping[str, Any], settings: TrackingConfig) -> RunIdentity:
    """The identity of the run whose tracker starts with `config` (`Tracker.start`).

    It is read from the run's folder, or drawn and stored there before any tracker receives a step. A damaged file is
    replaced: its run is not continued.
    """
    folder = None if config.get("directory") is None else Path(config["directory"])
    workdir = Path(config.get("workdir") or folder or ".").resolve()
    stage = str(config["stage"])
    if folder is not None and config.get("workdir"):
        stage = str(folder.resolve().relative_to(workdir)) if folder.resolve().is_relative_to(workdir) else folder.name
    stored = {} if folder is None else _stored(folder / FILE)
    group = settings.group or stored.get("group") or (workdir.name if folder is not None else "memory")
    found = RunIdentity(
        stored.get("id") or uuid.uuid4().hex[:16], group, stored.get("stage") or stage,
        Path(settings.directory).expanduser() if settings.directory else workdir / "trackers",
    )
    record = {"id": found.id, "group": found.group, "stage": found.stage}
    if folder is not None and stored != record:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps(record) + "\n")
    return found


def _stored(path: Path) -> dict[str, str]:
    """The stored identity; empty if there is none, or if the file is damaged."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(record, dict) and record.keys() == {"id", "group", "stage"}
    if not whole or not all(isinstance(value, str) and value for value in record.values()):
        return {}
    return record if re.fullmatch("[0-9a-f]{16}", record["id"]) else {}
