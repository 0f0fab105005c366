"""count: writes the number of prompts of the run."""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.config import Config
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared import run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.tracking.report.blocks import Section
from jaxalign.tracking.workdir import RunFiles


def summary(run: RunFiles) -> Sequence[Section]:
    """The stage's section of the report."""
    return []


@STAGES.declare("count", section="jaxalign.config.sections.count:Count", learns_from=("prompts",), report=summary)
class CountStage(Stage):
    name = "count"
    config_fields = ("model", "data", "world", "count")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return ("pretrain",)

    def run(self, context: StageContext) -> None:
        section = context.config.count
        prompts = sources.prompts(context, run_models.load_tokenizer(context), "rl", section.prompts, 1)
        write_json(context.directory / "summary.json", {"prompts": len(prompts)})
