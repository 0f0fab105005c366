"""report: writes one self-contained HTML file about the run."""

from __future__ import annotations

from pathlib import Path

from jaxalign.config import Config, rounds
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.tracking.report.page import render_report


@STAGES.declare("report")
class ReportStage(Stage):
    name = "report"
    config_fields = ("stages", "evaluate.examples")
    published = ("report.html",)

    def inputs(self, config: Config) -> tuple[str, ...]:
        return tuple(folder for folder in rounds.folders(config) if folder != self.name)

    def run(self, context: StageContext) -> None:
        """Does nothing: the report has no other files than the published one."""

    def publish(self, config: Config, workdir: Path) -> None:
        render_report(workdir, config.evaluate.examples)
