"""The section of stage evaluate with the results of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxalign.tracking.formatting import number
from jaxalign.tracking.measures import model_title
from jaxalign.tracking.report.blocks import FIRST, ReportSection, Table
from jaxalign.tracking.workdir import RunFiles


def harness_results(run: RunFiles) -> list[ReportSection]:
    """A table with a row for each metric of each task, and a column for each model; no section without tasks."""
    results = run.evaluation.get("lm_eval") or {}
    tasks: dict[str, Mapping[str, Any]] = {}
    for by_task in results.values():
        tasks |= {task: result for task, result in by_task.items() if task not in tasks}
    if not tasks:
        return []
    rows = []
    for task, about in tasks.items():
        for metric in about["metrics"]:
            cells = [_cell((by_task.get(task) or {}).get("metrics", {}).get(metric) or {}) for by_task in results.values()]
            rows.append([task, metric, _count(about["documents"]), _count(about["shots"]), *cells])
    header = ["Task", "Metric", "Documents", "Examples in the prompt", *(model_title(model, run.used) for model in results)]
    intro = "Tasks of lm-evaluation-harness. After ± is the standard error, where it is known."
    return [ReportSection("lm-eval", "Tasks of lm-evaluation-harness", intro, tables=(Table("", header, rows),), nav="lm-eval",
                          order=FIRST)]


def _cell(metric: Mapping[str, Any]) -> str:
    value, error = metric.get("value"), metric.get("stderr")
    if value is None:
        return "-"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _count(value: int | None) -> str:
    return "-" if value is None else number(value)
