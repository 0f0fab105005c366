"""The runs as a table in a terminal, with a line for each note and alert below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxalign.tracking.formatting import number, percent, seconds
from jaxalign.tracking.watching.run import (
    FINISHED,
    RUNNING,
    STALLED,
    STOPPED,
    UNKNOWN,
    UNREADABLE,
    RunStatus,
)

_COLOURS = {FINISHED: "green", RUNNING: "cyan", UNKNOWN: "dim", STALLED: "yellow", STOPPED: "yellow", UNREADABLE: "red"}
_BAR_COLUMNS = 12
WIDTH = 160
"""The columns of a table that is not printed on a terminal."""


def render(runs: Sequence[RunStatus]) -> RenderableType:
    """The table of the runs and the sentences below it."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=24)
    for title in ("state", "stage"):
        table.add_column(title, no_wrap=True)
    table.add_column("progress", no_wrap=True, min_width=_BAR_COLUMNS)
    for title in ("left", "tokens/s", "loss", "score", "KL", "length", "memory", "use"):
        if any(_cells(run)[title] for run in runs):
            table.add_column(title, justify="right", no_wrap=True)
    shown = [column.header for column in table.columns[4:]]
    for run in runs:
        cells = _cells(run)
        state = Text(run.state, style=_COLOURS.get(run.state, "red"))
        table.add_row(Text(run.name), state, Text(_stage(run)), _bar(run), *(cells[str(title)] for title in shown))
    return Group(table, *_sentences(runs))


def _cells(run: RunStatus) -> dict[str, str]:
    """The cells of a run by the title of the column; "" for an unknown number."""
    known = {"loss": run.loss, "score": run.score, "KL": run.kl, "length": run.length}
    cells = {title: "" if value is None else number(value) for title, value in known.items()}
    return cells | {
        "left": "" if run.seconds_left is None else seconds(run.seconds_left),
        "tokens/s": "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "memory": _memory(run), "use": _use(run),
    }


def _stage(run: RunStatus) -> str:
    if not run.stages:
        return ""
    done = f"{run.finished_stages}/{run.stages}"
    return f"{run.stage} ({done} done)" if run.stage else f"{done} done"


def _bar(run: RunStatus) -> RenderableType:
    """The bar of the stage with its counts."""
    if run.state == FINISHED:
        return ProgressBar(1, 1, width=_BAR_COLUMNS)
    if not run.total:
        return Text(f"{run.count:,} {run.unit}s" if run.count else "")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(run.total, min(run.count, run.total), width=_BAR_COLUMNS),
                 Text(f"{run.count:,}/{run.total:,} {run.unit}s"))
    return grid


def _memory(run: RunStatus) -> str:
    """The memory in use: of the fullest device, or of the process if the device reports none."""
    used, total = run.system.get("device_memory"), run.system.get("device_memory_total")
    if used is None:
        used, total = run.system.get("process_memory"), run.system.get("host_memory_total")
    if used is None:
        return ""
    return f"{used / 2**30:.1f} of {total / 2**30:.0f} GiB" if total else f"{used / 2**30:.1f} GiB"


def _use(run: RunStatus) -> str:
    """The model-FLOP utilisation; if the peak of the devices is unknown, the share of the host's processors that is used."""
    if run.utilisation is not None:
        return f"{percent(run.utilisation)} MFU"
    used = run.system.get("process_cpu")
    return "" if used is None else f"{percent(used)} CPU"


def _sentences(runs: Sequence[RunStatus]) -> list[RenderableType]:
    lines = []
    for run in runs:
        if run.note:
            lines.append(Text.from_markup(f"[bold]{escape(run.name)}[/]: {escape(run.note)}"))
        for stage, alert in run.alerts:
            lines.append(Text.from_markup(f"[bold]{escape(run.name)}[/], {escape(stage)}: [yellow]{escape(alert.text())}[/]"))
    return [Text(""), *lines] if lines else []
