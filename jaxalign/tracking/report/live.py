"""The opening of the report while the run goes on: where the run is, and what has changed since the stage began."""

from __future__ import annotations

from jaxalign.tracking.formatting import percent, seconds
from jaxalign.tracking.report.changes import curve_sentences
from jaxalign.tracking.watching.run import RunStatus
from jaxalign.tracking.workdir import RunFiles


def live_sentences(run: RunFiles, status: RunStatus) -> list[str]:
    """The progress of the stage that runs, and its changes in words; none if `status` has no stage."""
    if not status.stage:
        return []
    return [_progress(status), *curve_sentences(run, status.stage)]


def _progress(status: RunStatus) -> str:
    parts = []
    if status.total:
        parts.append(f"{status.count:,} of {status.total:,} {status.unit}s ({percent(status.count / status.total)})")
    if status.seconds_left is not None:
        parts.append(f"about {seconds(status.seconds_left)} left in this stage")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens per second")
    if status.utilisation is not None:
        parts.append(f"{percent(status.utilisation)} of the devices' peak")
    details = f": {', '.join(parts)}" if parts else ""
    return f"Stage {status.stage} runs, {status.finished_stages} of {status.stages} stages are finished{details}."
