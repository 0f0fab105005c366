"""The base class of the built-in stages."""

from __future__ import annotations

from pathlib import Path

from jaxalign.config import Config
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared import judges, reads
from jaxalign.stages.shared.base import Stage


class BuiltinStage(Stage):
    """A stage whose record in `STAGES` determines the files that it reads."""

    def files(self, config: Config) -> dict[Path, str]:
        """The files of the base, and those of the data source, the judge and the sampler, if the stage uses them."""
        record = STAGES.get(self.name)
        paths = reads.base_files(config)
        if record.learns_from:
            paths |= reads.data_files(config)
        if record.asks_judge or self.name == "evaluate":  # Evaluation checks its judge even if it compares no answers.
            paths |= judges.feedback_files(config, self.name)
        if record.uses_sampler:
            paths |= reads.plugin_file(config.sampler, "sampler")
        return paths
