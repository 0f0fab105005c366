"""Serves the numbers of runs to Prometheus. They are read from the work directories whenever Prometheus asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.errors import UserError
from jaxalign.tracking.watching.run import STATES, RunStatus, RunView

_GAUGES = {
    "stages_finished": ("finished_stages", "Finished stages of the run."),
    "stages_planned": ("stages", "Planned stages of the run."),
    "stage_count": ("count", "Steps, prompts or other units that the stage has completed."),
    "stage_total": ("total", "Units of the whole stage; 0 if unknown."),
    "stage_seconds_left": ("seconds_left", "Estimated seconds to the end of the stage."),
    "step_seconds": ("step_seconds", "Median seconds of a step."),
    "idle_seconds": ("idle", "Seconds since the last change of the run's files."),
    "tokens_per_second": ("tokens_per_second", "Tokens per second of the stage."),
    "model_flop_utilisation": ("utilisation", "Needed FLOPs as a share of the peak of the devices."),
    "loss": ("loss", "Mean loss over the last rows."),
    "score": ("score", "Mean score over the last rows."),
    "kl": ("kl", "Mean KL to the reference over the last rows, in nats per response."),
    "response_length": ("length", "Mean length of responses over the last rows, in tokens."),
}
"""The gauges of a run: by name, the field of `RunStatus` and the help text."""

_SYSTEM = {
    "host_cpu": ("cpu", "Load of the host's processors, 0 to 1."),
    "process_cpu": ("process_cpu", "Share of the host's processors that the process uses, 0 to 1."),
    "process_memory_bytes": ("process_memory", "Resident memory of the process."),
    "host_memory_bytes": ("host_memory", "Memory in use on the host."),
    "host_memory_total_bytes": ("host_memory_total", "Memory of the host."),
    "disk_free_bytes": ("disk_free", "Free space of the file system with the work directory."),
    "device_memory_bytes": ("device_memory", "Memory in use on the fullest device."),
    "device_memory_peak_bytes": ("device_memory_peak", "Largest memory in use on the fullest device."),
    "device_memory_total_bytes": ("device_memory_total", "Memory of the fullest device."),
}
"""The gauges of system.jsonl: by name, the field of its rows and the help text."""


class Collector:
    """A collector of `prometheus_client` for runs. Runs are read at most once in `every` seconds."""

    def __init__(self, views: Sequence[RunView], every: float = 0.0):
        self._views, self._every = views, every
        self._lock, self._read_at, self._runs = threading.Lock(), -every, []

    def collect(self) -> Iterator[Any]:
        """The families of metrics, all named jaxalign_NAME, with the labels run and stage."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:  # Requests come in several threads, and a view must not be read in two.
            if time.monotonic() - self._read_at >= self._every:
                self._runs, self._read_at = [view.status() for view in self._views], time.monotonic()
            runs = self._runs
        for name, (field, text) in _GAUGES.items():
            yield _family(name, text, runs, lambda run, field=field: getattr(run, field))
        for name, (field, text) in _SYSTEM.items():
            yield _family(name, text, runs, lambda run, field=field: run.system.get(field))
        states = GaugeMetricFamily("jaxalign_state", "1 for the state of the run, 0 for the others.", labels=("run", "state"))
        alerts = GaugeMetricFamily("jaxalign_alert", "1 for an alert of the run.", labels=("run", "stage", "alert"))
        for run in runs:
            for state in STATES:
                states.add_metric((str(run.path), state), float(run.state == state))
            for stage, alert in run.alerts:
                alerts.add_metric((str(run.path), stage, alert.name), 1.0)
        yield from (states, alerts)


def _family(name: str, text: str, runs: Sequence[RunStatus], value) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"jaxalign_{name}", text, labels=("run", "stage"))
    for run in runs:
        if value(run) is not None:
            family.add_metric((str(run.path), run.stage), float(value(run)))
    return family


def start(views: Sequence[RunView], port: int, every: float, address: str) -> Any:
    """Serves the runs at http://ADDRESS:PORT/metrics in a thread, and returns the server.

    Raises:
      UserError: prometheus_client is not installed, or the address cannot be served.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise UserError("--prometheus needs the package prometheus_client; install it with "
                        "`pip install 'jaxalign[prometheus]'`") from None
    registry = CollectorRegistry()
    registry.register(Collector(views, every))
    try:
        return start_http_server(port, address, registry)[0]
    except OSError as error:
        raise UserError(f"http://{address}:{port} cannot be served ({error.strerror or error}); give another --prometheus port "
                        "or --address") from None


def serve(views: Sequence[RunView], port: int, every: float, address: str) -> None:
    """Serves the runs until the user interrupts. The arguments and errors are those of `start`."""
    start(views, port, every, address)
    print(f"Serving {len(views)} runs at http://{address}:{port}/metrics", flush=True)
    threading.Event().wait()
