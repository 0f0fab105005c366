"""report: writes one self-contained HTML file about the run."""

from __future__ import annotations

from jaxalign.config import Config, rounds
from jaxalign.parallel import hosts
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.tracking.report.page import render_report


@STAGES.declare("report")
class ReportStage(Stage):
    name = "report"
    config_fields = ("stages", "evaluate.examples")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return tuple(folder for folder in rounds.folders(config) if folder != self.name)

    def run(self, context: StageContext) -> None:
        hosts.once(lambda: str(render_report(context.workdir, context.config.evaluate.examples)))
