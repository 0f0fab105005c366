"""report: writes one self-contained HTML file about the run."""

from __future__ import annotations

from jaxalign.config import Config
from jaxalign.parallel import hosts
from jaxalign.registry.stages import stages_in_order
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.tracking.report.page import render_report


class Report(Stage):
    name = "report"
    config_fields = ("stages", "evaluate.examples")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return tuple(record.name for record in stages_in_order(config.stages) if record.name != self.name)

    def run(self, context: StageContext) -> None:
        hosts.once(lambda: str(render_report(context.workdir, context.config.evaluate.examples)))


STAGE = Report()
