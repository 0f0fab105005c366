"""trackio: its local database, from which `trackio sync` publishes a project."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

from jaxalign.errors import UserError
from jaxalign.tracking.metrics import Metrics
from jaxalign.tracking.sinks.attachments import TABLE, Attachments
from jaxalign.tracking.sinks.base import Sink, clean, library

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio(Sink):
    """Sends to trackio, which keeps its database in TRACKIO_DIR. The steps are those in the database."""

    def open(self, config: Mapping[str, Any]) -> None:
        for variable in _REMOTE:  # The steps of a remote database cannot be read reliably while it starts.
            if os.environ.get(variable):
                raise UserError(f"the environment variable {variable} is set, but runs are tracked in the local database of "
                                "trackio; unset it, and publish the project with `trackio sync`")
        with library("trackio", "trackio"):
            import trackio
            from trackio.sqlite_storage import SQLiteStorage
        self._trackio = trackio
        rows = SQLiteStorage.get_logs(self.settings.project, self.run.name)
        self._next, self._names = 0, set()
        for row in rows:
            attachments = {name for name, value in row.items() if isinstance(value, dict) and "_type" in value}
            self._names |= attachments
            if not attachments:
                self._next = max(self._next, row["step"] + 1)
        prefix = f"{self.run.id}-"
        artifacts = (artifact["name"] for artifact in SQLiteStorage.list_artifacts(self.settings.project))
        self._names |= {name.removeprefix(prefix) for name in artifacts if name.startswith(prefix)}
        with contextlib.redirect_stdout(io.StringIO()):  # Five lines of instructions for each stage.
            self._run = self._trackio.init(
                project=self.settings.project, name=self.run.name, group=self.run.group, config=dict(config), resume="allow",
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def attach(self, attachments: Attachments, step: int) -> None:
        row: dict[str, Any] = {name: self._trackio.Histogram(list(values)) for name, values in attachments.histograms.items()}
        if attachments.rows:
            cells = [[clean(cell) if isinstance(cell, str) else cell for cell in line] for line in attachments.rows]
            row[TABLE] = self._trackio.Table(columns=list(attachments.columns), data=cells)
        if row:
            self._run.log(row, step=step)
        for name, path in attachments.files.items():
            self._run.log_artifact(str(path), name=f"{self.run.id}-{name}", type="report")

    def finish(self, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
