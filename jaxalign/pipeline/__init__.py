"""The pipeline: runs stages in order, skips finished ones, resumes interrupted ones, and reports changed ones as an error."""

from jaxalign.pipeline.changes import find_changes
from jaxalign.pipeline.dry_run import dry_run
from jaxalign.pipeline.graph import load_stage
from jaxalign.pipeline.running import RunResult, StageResult, run

__all__ = ["RunResult", "StageResult", "dry_run", "find_changes", "load_stage", "run"]
