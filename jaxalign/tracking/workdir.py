"""Reads a work directory as `docs/data_formats.md` lays it out, whatever part of it is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import STAGES
from jaxalign.errors import UserError
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.timing import PhaseTotal, read_timing


@dataclasses.dataclass(frozen=True)
class StageFiles:
    """What one stage left. `status` is "done", "running", or None without a manifest; absent files read as empty."""

    name: str
    status: str | None = None
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    timing: Mapping[str, PhaseTotal] = dataclasses.field(default_factory=dict)

    @property
    def started(self) -> bool:
        """Whether the stage left anything at all."""
        return bool(self.status or self.summary or self.metrics or self.timing)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """The steps and values of one metric, where a row has it as a number."""
        rows = [row for row in self.metrics if isinstance(row.get(name), (int, float)) and "step" in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """A work directory: its config, the evaluation's summary, and every stage known, planned or present."""

    path: Path
    config: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    stages: Mapping[str, StageFiles]

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the evaluation, in its order."""
        return tuple(self.evaluation.get("models") or ())

    @property
    def planned(self) -> tuple[str, ...]:
        """The stages the config asks for; without a config, those that are there."""
        return tuple(self.config.get("stages") or [name for name, stage in self.stages.items() if stage.started])

    def stage(self, name: str) -> StageFiles:
        """The stage's files; empty ones for a stage that is not there."""
        return self.stages.get(name) or StageFiles(name)

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """The stage's generated records, shard after shard. Raises UserError at a line that is not JSON."""
        for path in sorted((self.path / stage).glob("rows-*.jsonl")):
            yield from read_rows(path)

    def content(self, stage: str, name: str) -> Mapping[str, Any]:
        """A JSON file of the stage; empty where it is not there."""
        return _read_object(self.path / stage / name)

    def absence(self, stage: str, what: str) -> str:
        """One sentence that says why `what`, which `stage` would have written, is not there."""
        if stage not in self.planned:
            return f"This run has no {stage} stage, so there is nothing to show about {what}."
        status = self.stage(stage).status
        if status == "running":
            return f"The {stage} stage has not finished yet; once it has, this section shows {what}."
        if status == "done":
            return f"The {stage} stage finished without recording {what}."
        return f"The {stage} stage has not run yet; once it has, this section shows {what}."


def read_run(workdir: str | Path) -> RunFiles:
    """Reads everything but the generated records, which `RunFiles.rows` reads when asked.

    Raises:
        UserError: the directory is missing, holds nothing of a run, or one of its files is not what it should be.
    """
    path = Path(workdir)
    if not path.is_dir():
        raise UserError(f"The work directory {path} does not exist; give the --workdir of a run that has started.")
    config = _read_object(path / "config.json")
    present = {child.parent.name for child in path.glob("*/*") if child.name in _STAGE_FILES and
               ".old-" not in child.parent.name}
    names = dict.fromkeys([*(config.get("stages") or ()), *STAGES, *sorted(present)])
    stages = {name: _read_stage(path / name) for name in names}
    if not any(stage.started for name, stage in stages.items() if name != "report"):
        raise UserError(f"There is nothing to report in {path}: no stage has written anything there yet; "
                        f"run `python -m jaxalign.train --workdir={path}` first.")
    evaluation = _read_object(path / "summary.json") or stages["evaluate"].summary
    return RunFiles(path, config, evaluation, stages)


_STAGE_FILES = ("manifest.json", "metrics.jsonl", "timing.jsonl", "summary.json")


def _read_stage(path: Path) -> StageFiles:
    manifest, metrics, timing, summary = (path / name for name in _STAGE_FILES)
    return StageFiles(path.name, _read_object(manifest).get("status"), _read_object(summary), read_metrics(metrics),
                      read_timing(timing))


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); mend it, or move it away and run the stage again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; a JSON object is expected.")
    return content
