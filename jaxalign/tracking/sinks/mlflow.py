"""MLflow: the store of MLFLOW_TRACKING_URI, or an SQLite file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxalign.tracking.metrics import Metrics
from jaxalign.tracking.sinks.attachments import TABLE, Attachments
from jaxalign.tracking.sinks.base import Sink, clean, library

_KEY = "jaxalign.run"  # The tag with the id of the run; MLflow draws its own run ids.
_MOST_PARAMS, _LONGEST = 100, 6000  # The limits of MLflow for one request and one value.
_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""A server that is down must not hold training up for the minutes of MLflow's defaults."""


class MLflow(Sink):
    """Sends to MLflow: one experiment per project, one run per stage. The steps are those in the store."""

    def open(self, config: Mapping[str, Any]) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with library("mlflow", "mlflow"):
            from mlflow import entities, tracking
        self._entities = entities
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder = self.run.files.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri, place = f"sqlite:///{folder}/mlflow.db", (folder / "mlflow_files").as_uri()
        self._client = client = tracking.MlflowClient(uri)
        experiment = client.get_experiment_by_name(self.settings.project)
        if experiment is None:
            number = client.create_experiment(self.settings.project, artifact_location=place)
        else:
            number = experiment.experiment_id
        runs = client.search_runs([number], f"tags.`{_KEY}` = '{self.run.id}'", max_results=1)
        if runs:
            self._id, known = runs[0].info.run_id, runs[0].data
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {_KEY: self.run.id, "group": self.run.group, "stage": self.run.stage} | dict.fromkeys(self.settings.tags, "")
            run = client.create_run(number, run_name=self.run.name, tags=tags)
            self._id, known = run.info.run_id, run.data
        self._next = max((metric.step + 1 for name in known.metrics
                          for metric in client.get_metric_history(self._id, name)[-1:]), default=0) if runs else 0
        params = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in map(_named, config.items())
                  if name not in known.params]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(1000 * time.time())
        named = [self._entities.Metric(name, value, now, step) for name, value in map(_named, metrics.items())]
        self._client.log_batch(self._id, metrics=named)

    def attached(self) -> set[str]:
        names = {file.path for file in self._client.list_artifacts(self._id)}
        return {name.removesuffix(".json") for name in names} | set(self._histograms(names))

    def _histograms(self, names: set[str]) -> list[str]:
        if "histogram" not in names:
            return []
        found, waiting = [], ["histogram"]
        while waiting:
            for file in self._client.list_artifacts(self._id, waiting.pop()):
                if file.is_dir:
                    waiting.append(file.path)
                else:
                    found.append(file.path.removesuffix(".json"))
        return found

    def attach(self, attachments: Attachments, step: int) -> None:
        for name, values in attachments.histograms.items():
            counts, edges = np.histogram(values, bins="auto")
            self._client.log_dict(self._id, {"edges": edges.tolist(), "counts": counts.tolist()}, f"{name}.json")
        for path in attachments.files.values():
            self._client.log_artifact(self._id, str(path))
        if attachments.rows:
            columns = zip(*attachments.rows, strict=True)
            cells = [[clean(cell) if isinstance(cell, str) else cell for cell in column] for column in columns]
            self._client.log_table(self._id, dict(zip(attachments.columns, cells, strict=True)), f"{TABLE}.json")

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, _STATUS[status])


def _named(item: tuple[str, Any]) -> tuple[str, Any]:
    """An entry with a name of the characters that MLflow permits, which is a path without empty parts."""
    parts = re.sub(r"[^\w\-. :/]", "_", item[0]).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts), item[1]
