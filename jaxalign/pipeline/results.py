"""What a run of the pipeline returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.storage import Storage
from jaxalign.tracking import table


@dataclasses.dataclass(frozen=True)
class StageResult:
    """One stage that is done: its name, its folder, and its summary (empty where it wrote none)."""

    name: str
    directory: Path
    summary: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
      workdir: the work directory.
      stages: every stage of the config by name, in the order in which they ran.
      evaluation: the summary of stage evaluate, as docs/data_formats.md lays it out; None where the run has none.
      report: the report's path; None where the run has none.
    """

    workdir: Path
    stages: Mapping[str, StageResult]
    evaluation: Mapping[str, Any] | None
    report: Path | None

    def table(self) -> str:
        """The evaluation as a table of text; empty where the run has none."""
        return "" if self.evaluation is None else table.render(self.evaluation, tuple(self.stages))


def read_results(storage: Storage, stages: Sequence[str]) -> RunResult:
    """The results of the stages, all of which are done, from their work directory."""

    def summary(name: str) -> Mapping[str, Any] | None:
        content = storage.read(name)
        return None if content is None else json.loads(content.decode("utf-8"))

    found = {name: StageResult(name, storage.path(name), summary(f"{name}/summary.json") or {}) for name in stages}
    report = storage.path("report.html")
    return RunResult(
        storage.path(), found, summary("summary.json") if "evaluate" in found else None,
        report if "report" in found and report.exists() else None,
    )
