"""What a run writes and posts for those who watch it, with a real pipeline, server and threads."""

from __future__ import annotations

import errno
import http.server
import json
import logging
import signal
import socket
import threading
import time

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.pipeline import companions
from jaxalign.stages.report import ReportStage
from jaxalign.stages.shared.base import Stage
from jaxalign.tracking.tracker import Trackers
from jaxalign.tracking.watching.run import RunView
from jaxalign.tracking.webhook import Webhook
from tests import processes
from tests.parallel import host_programs

SECRET = "services/T0/hook-81a7"


class Trains(Stage):
    """Logs 30 rows whose KL is 50 nats, until `goes_on()` is false; then ends or raises `error`."""

    name, config_fields = "ppo", ("ppo.kl_coef",)

    def __init__(self, goes_on, error=None):
        self.goes_on, self.error = goes_on, error

    def run(self, context):
        with Trackers("ppo", context.directory) as trackers:
            for step in range(30):
                trackers.log(step, {"score": 1.0, "kl_k3": 50.0, "response_length": 10.0})
            until = time.monotonic() + 60
            while self.goes_on() and time.monotonic() < until:
                time.sleep(0.01)
        assert not self.goes_on()
        if self.error:
            raise self.error


def run(workdir, stage, stages=("ppo", "report"), **tracking):
    settings = {"system_seconds": 0.02, "live_report_seconds": 0.02} | tracking
    config = from_config_dict({"stages": stages, "compile_cache": None, "tracking": settings})
    pipeline.run(config, workdir, load={"ppo": stage, "report": ReportStage()}.__getitem__)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(companions, "MOST_SHARE", 1.0)
    monkeypatch.setattr(companions, "_FIRST_SECONDS", 0.0)


@pytest.fixture
def server(monkeypatch):
    """The objects posted to a server whose URL has a secret path."""
    posted = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if len(posted) > 2 else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{http_server.server_port}/{SECRET}")
        yield posted
        http_server.shutdown()
        thread.join()


def waits_for_page(workdir):
    page = workdir / "report.html"
    return lambda: not (page.exists() and 'http-equiv="refresh"' in (text := page.read_text()) and "50 nats" in text)


def test_the_report_is_written_during_the_run_and_refreshes_itself_until_the_end(tmp_path):
    pages = []

    def goes_on():
        waits = waits_for_page(tmp_path)()
        if not waits:
            pages.append((tmp_path / "report.html").read_text())
        return waits

    run(tmp_path, Trains(goes_on))
    assert "Stage ppo runs, 0 of 2 stages are finished" in pages[0]
    assert "The KL to the reference is 50 nats per response" in pages[0]
    last = (tmp_path / "report.html").read_text()
    assert "refresh" not in last and "ppo ✓" in last and "The KL to the reference is 50 nats" in last
    assert RunView(tmp_path).status().state == "finished"
    outputs = json.loads((tmp_path / "ppo" / "manifest.json").read_text())["outputs"]
    assert list(outputs) == ["metrics.jsonl"]
    run(tmp_path, Trains(lambda: True))  # Nothing is computed, and no file counts as changed.
    assert (tmp_path / "report.html").read_text() == last


def test_a_run_that_ends_before_its_first_page_leaves_one(tmp_path):
    """And replaces the page of a process that was killed, which would reload itself for ever."""
    (tmp_path / "report.html").write_text('<meta http-equiv="refresh" content="60">')
    with pytest.raises(RuntimeError):
        run(tmp_path, Trains(lambda: False, RuntimeError("out of luck")), live_report_seconds=60, system_seconds=0)
    page = (tmp_path / "report.html").read_text()
    assert "refresh" not in page and "The KL to the reference is 50 nats" in page and "ppo: failed" in page


def test_a_run_that_fails_leaves_a_page_without_refresh_and_its_reason(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, Trains(waits_for_page(tmp_path), RuntimeError("out of luck\nand more")))
    page = (tmp_path / "report.html").read_text()
    assert "refresh" not in page and "The run failed in stage ppo: RuntimeError: out of luck." in page
    status = RunView(tmp_path).status()
    assert (status.state, status.note) == ("failed", "The run failed: RuntimeError: out of luck")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Trains(waits_for_page(tmp_path), KeyboardInterrupt()))
    assert RunView(tmp_path).status().state == "interrupted"
    page = (tmp_path / "report.html").read_text()
    assert "refresh" not in page and "The run was interrupted in stage ppo. The same command resumes it." in page
    with pytest.raises(OSError):
        run(tmp_path, Trains(waits_for_page(tmp_path), OSError(errno.ENOSPC, "No space left on device")))
    assert RunView(tmp_path).status().note == ("The run failed: the disk is full ([Errno 28] No space left on device); free "
                                               "some space and run the same command again to resume")
    page = (tmp_path / "report.html").read_text()
    assert "run the same command again to resume.</p>" in page and "interrupted" not in page


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_run_that_fails_before_it_writes_anything_leaves_a_page_until_it_is_resumed(tmp_path, seconds):
    class Fails(Stage):
        name = "ppo"

        def run(self, context):
            raise UserError("no prompts are left;\n  give more")

    with pytest.raises(UserError):
        run(tmp_path, Fails(), system_seconds=60, live_report_seconds=seconds)
    assert "The run failed in stage ppo: no prompts are left; give more." in (tmp_path / "report.html").read_text()
    run(tmp_path, Trains(lambda: False), system_seconds=60, live_report_seconds=seconds)
    assert "The run failed" not in (tmp_path / "report.html").read_text()


def test_a_run_without_stage_report_or_with_the_fields_at_0_writes_no_page_and_no_system_metrics(tmp_path):
    run(tmp_path / "a", Trains(lambda: not (tmp_path / "a" / "system.jsonl").exists()), stages=("ppo",))
    assert not (tmp_path / "a" / "report.html").exists()
    run(tmp_path / "b", Trains(lambda: False), stages=("ppo",), system_seconds=0, live_report_seconds=0)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [".lock", "config.json", "ppo"]


def test_system_metrics_describe_the_machine(tmp_path):
    run(tmp_path, Trains(lambda: not (tmp_path / "system.jsonl").exists()), stages=("ppo",))
    first, *others, last = map(json.loads, (tmp_path / "system.jsonl").read_text().splitlines())
    assert first["stage"] == "ppo" and abs(first["time"] - time.time()) < 60
    assert 0 < first["process_memory"] < first["host_memory_total"] and first["disk_free"] > 0
    assert all(0 <= row["cpu"] <= 1 and 0 <= row["process_cpu"] <= 1 for row in others) and "cpu" not in first
    assert last["event"] == "finished"


def test_alerts_and_the_end_are_posted_and_the_url_is_in_no_file_or_message(tmp_path, server, caplog):
    with caplog.at_level(logging.WARNING, "jaxalign"):
        run(tmp_path / "fine", Trains(lambda: False), webhook="MY_HOOK")
    assert [path for path, _ in server] == [f"/{SECRET}"] * 2
    alert, end = (content for _, content in server)
    assert (alert["run"], alert["event"], alert["alert"], alert["stage"], alert["step"]) == ("fine", "alert", "kl", "ppo", 4)
    assert alert["text"].startswith("[ppo] The KL to the reference is 50 nats") and alert["text"] in caplog.text
    assert (end["event"], end["text"]) == ("finished", "The run fine finished")
    run(tmp_path / "refused", Trains(lambda: False), webhook="MY_HOOK")  # The server now answers with an error.
    assert caplog.text.count("the webhook of MY_HOOK failed (HTTP status 500)") == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()] and SECRET not in caplog.text


@pytest.mark.variants(1)
@pytest.mark.process
@pytest.mark.parametrize(("number", "code", "event", "why"), [
    (signal.SIGKILL, 1, "failed", "it was killed, or its host was lost"), (signal.SIGTERM, 143, "interrupted", "interrupted"),
])
def test_the_end_of_another_process_is_recorded_and_posted_as_the_cause(tmp_path, server, number, code, event, why):
    """Not the error of a collective that fails because a process is killed, which may be raised before that is noticed."""
    program = f"from {host_programs.__name__} import recording; recording()"
    with processes.started(2, ["-c", program, str(tmp_path)]) as running:
        for process in running:
            while process.stderr.readline() not in ("up\n", ""):
                pass
        if number == signal.SIGKILL:
            (tmp_path / "fails").touch()
            time.sleep(0.2)
        running[1].send_signal(number)
        first, _ = processes.ends(running, timeout=120)
    sentence = f"process 0 ends because process 1 did: {why}"
    assert first.code == code and first.err.splitlines()[-1] == sentence and "Traceback" not in first.err
    last = json.loads((tmp_path / "system.jsonl").read_text().splitlines()[-1])
    assert (last["stage"], last["event"], last["error"]) == ("ppo", event, sentence)
    assert [(posted["event"], posted["text"].partition(": ")[2]) for _, posted in server] == [(event, sentence)]


def test_a_webhook_that_cannot_be_reached_is_warned_of_with_the_cause(monkeypatch, caplog):
    with socket.socket() as taken:  # Bound but not listening, so that connections are refused.
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{taken.getsockname()[1]}/{SECRET}")
        with caplog.at_level(logging.WARNING, "jaxalign"), Webhook("MY_HOOK") as webhook:
            webhook.post({"event": "alert"})
    assert "the webhook of MY_HOOK failed (ConnectionRefusedError)" in caplog.text and SECRET not in caplog.text


def test_a_webhook_without_a_url_is_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="MY_HOOK, which is not set"):
        run(tmp_path, Trains(lambda: False), webhook="MY_HOOK")
    monkeypatch.setenv("MY_HOOK", f"ftp://{SECRET}")
    with pytest.raises(UserError, match="MY_HOOK .* is not a URL that begins with http://") as raised:
        run(tmp_path, Trains(lambda: False), webhook="MY_HOOK")
    assert SECRET not in str(raised.value)
    with pytest.raises(UserError, match="must be the name of an environment variable") as raised:
        run(tmp_path, Trains(lambda: False), webhook=f"https://{SECRET}")
    assert SECRET not in str(raised.value)
