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
_BAR_COLUMNS, _NAME_COLUMNS, _GAP = 12, 24, 2
_ORDER = ("left", "tokens/s", "loss", "score", "KL", "length", "memory", "use")
_IMPORTANT_FIRST = ("left", "score", "KL", "loss", "tokens/s", "memory", "length", "use")
WIDTH = 160
"""The columns of a table that is not printed on a terminal."""


def render(runs: Sequence[RunStatus], width: int = WIDTH) -> RenderableType:
    """The table of the runs in so many columns of text, and the sentences below it. Numbers that do not fit are left out, the
    least important first."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=_NAME_COLUMNS, min_width=4)
    for title in ("state", "stage", "progress"):
        table.add_column(title, no_wrap=True)
    cells = [_cells(run) for run in runs]
    shown = _fitting(runs, cells, width)
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for run, numbers in zip(runs, cells, strict=True):
        state = Text(run.state, style=_COLOURS.get(run.state, "red"))
        table.add_row(Text(run.name), state, Text(_stage(run)), _bar(run), *(numbers[title] for title in shown))
    return Group(table, *_sentences(runs))


def _fitting(runs: Sequence[RunStatus], cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """The titles of the numbers that fit and that at least one run has, in the order of the table."""
    bars = [(_BAR_COLUMNS + 2 if run.total or run.state == FINISHED else 0) + len(_counts(run)) for run in runs]
    fixed = [[min(len(run.name), _NAME_COLUMNS) for run in runs], [len(run.state) for run in runs],
             [len(_stage(run)) for run in runs], bars]
    left = width - sum(max(lengths, default=0) + _GAP for lengths in fixed)
    kept = set()
    for title in _IMPORTANT_FIRST:
        longest = max((len(row[title]) for row in cells), default=0)
        needed = max(longest, len(title)) + _GAP
        if longest and needed <= left:
            kept.add(title)
            left -= needed
    return [title for title in _ORDER if title in kept]


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


def _counts(run: RunStatus) -> str:
    if run.state == FINISHED or not run.count and not run.total:
        return ""
    return f"{run.count:,}/{run.total:,} {run.unit}s" if run.total else f"{run.count:,} {run.unit}s"


def _bar(run: RunStatus) -> RenderableType:
    """The bar of the stage with its counts."""
    if run.state == FINISHED:
        return ProgressBar(1, 1, width=_BAR_COLUMNS)
    if not run.total:
        return Text(_counts(run))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(run.total, min(run.count, run.total), width=_BAR_COLUMNS), Text(_counts(run)))
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
