"""The results that a run of the pipeline returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.storage import Storage
from jaxalign.tracking import table
from jaxalign.tracking.workdir import MANIFEST, kl_reference, read_config, read_object, used_stages


@dataclasses.dataclass(frozen=True)
class StageResult:
    """A finished stage: its name ("ppo", or "round-2/ppo" in a later round of `config.rounds`), its folder, and its summary
    (empty if it wrote none)."""

    name: str
    directory: Path
    summary: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
      workdir: the work directory.
      stages: every stage of the config by name, in the order in which they ran.
      evaluation: the summary of stage evaluate (format: docs/data_formats.md); None if the run does not evaluate.
      report: the report's path; None if the run has no report.
    """

    workdir: Path
    stages: Mapping[str, StageResult]
    evaluation: Mapping[str, Any] | None
    report: Path | None

    def table(self) -> str:
        """The evaluation as a text table; empty if the run does not evaluate."""
        if self.evaluation is None:
            return ""
        used = used_stages(self.workdir, self.stages)
        recorded = read_object(self.workdir / "evaluate" / MANIFEST).get("config") or {}
        reference = kl_reference(recorded, read_config(self.workdir))
        return table.render(self.evaluation, tuple(self.stages) if used is None else used, reference)


def read_results(storage: Storage, stages: Sequence[str]) -> RunResult:
    """Reads the results of finished stages from their work directory."""
    folders = {name: storage.path(name) for name in stages}
    results = {name: StageResult(name, folder, read_object(folder / "summary.json")) for name, folder in folders.items()}
    evaluation = (read_object(storage.path("summary.json")) or None) if "evaluate" in results else None
    report = storage.path("report.html")
    return RunResult(storage.path(), results, evaluation, report if "report" in results and report.exists() else None)
