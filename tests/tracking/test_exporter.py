"""The numbers that Prometheus reads, over HTTP, and the dashboard that shows them."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import urllib.request

import pytest

from jaxalign.errors import UserError
from jaxalign.tracking.watching import exporter
from jaxalign.tracking.watching.run import RunView

pytest.importorskip("prometheus_client")
DASHBOARD = pathlib.Path(__file__).resolve().parents[2] / "launch" / "grafana.json"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_numbers_of_each_run_are_served(tmp_path):
    folder = tmp_path / "a" / "ppo"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "config.json").write_text('{"stages": ["ppo"], "ppo": {"iterations": 40}}')
    (folder / "manifest.json").write_text('{"status": "running"}')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "score": 2.5, "kl_k3": 50.0, "response_length": 9.0}}\n'
                                                  for n in range(20)))
    row = {"time": 1.0, "stage": "ppo", "cpu": 0.25, "process_memory": 1, "disk_free": 1024}
    (tmp_path / "a" / "system.jsonl").write_text(json.dumps(row) + "\n")
    port = free_port()
    server = exporter.start([RunView(tmp_path / "a"), RunView(tmp_path / "none")], port, 0.0, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        with pytest.raises(UserError, match=f"http://127.0.0.1:{port} cannot be served"):
            exporter.start([], port, 0.0, "127.0.0.1")
    finally:
        server.shutdown()
        server.server_close()
    here, none = (f'run="{tmp_path / name}"' for name in ("a", "none"))
    for line in (f'jaxalign_score{{{here},stage="ppo"}} 2.5', f'jaxalign_stage_count{{{here},stage="ppo"}} 20.0',
                 f'jaxalign_stage_total{{{here},stage="ppo"}} 40.0', f'jaxalign_host_cpu{{{here},stage="ppo"}} 0.25',
                 f'jaxalign_disk_free_bytes{{{here},stage="ppo"}} 1024.0', f'jaxalign_state{{{here},state="running"}} 1.0',
                 f'jaxalign_alert{{alert="kl",{here},stage="ppo"}} 1.0', f'jaxalign_state{{{none},state="unreadable"}} 1.0'):
        assert line in lines


def test_every_query_of_the_dashboard_reads_a_gauge_that_is_served():
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"jaxalign_(\w+)", target["expr"])}
    assert len(asked) > 10 and asked <= {*exporter._GAUGES, *exporter._SYSTEM, "state", "alert"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
