"""A user's stage: it finds the first step at which the loss of the base is within a tolerance of its lowest value."""

import dataclasses

from jaxalign.config import above, field
from jaxalign.registry.stages import StageRecord
from jaxalign.stages.shared.base import Stage, write_json
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.report.blocks import ReportSection


@dataclasses.dataclass(frozen=True)
class Settings:
    tolerance: float = field(0.01, "Nats per token.", above(0))


class Plateau(Stage):
    name, config_fields = "plateau", ("plateau",)

    def inputs(self, config):
        return ("pretrain",)

    def run(self, context):
        losses = [row["loss"] for row in read_metrics(context.input_directory("pretrain") / "metrics.jsonl")]
        step = next(step for step, loss in enumerate(losses) if loss <= min(losses) + context.config.plateau.tolerance)
        write_json(context.directory / "summary.json", {"step": step})


RECORD = StageRecord("plateau", Plateau(), section=Settings, after=("pretrain",),
                     report=lambda run: ReportSection("plateau", "Plateau", f"At step {run.stage('plateau').summary['step']}."))
