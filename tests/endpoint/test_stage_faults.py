"""Stages whose judge is behind a faulty server: the rows are those of an undisturbed run, and the API key appears nowhere."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from tests.endpoint.clients import KEY, VARIABLE
from tests.endpoint.proxy import FAULTS, Proxy
from tests.endpoint.runs import rows, values, write_inputs

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = ("revise", "compare", "report")
CONCURRENCY = 4
KILLS = int(os.environ.get("JAXALIGN_TEST_KILLS", "2"))
"""The number of times that a run is killed."""
ONLY_READ = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
"""The environment in which processes use stored programs, but store none: one that is killed may leave half a file."""


class Undisturbed(NamedTuple):
    """A run without faults. requests: the number of distinct requests that it sent."""

    rows: dict[str, bytes]
    requests: int


@pytest.fixture(scope="module")
def running(tiny_server):
    with Proxy(tiny_server.server.url, KEY) as proxy:
        yield proxy


@pytest.fixture
def proxy(running, monkeypatch):
    """The proxy without faults, with counts of 0. The environment has the key."""
    monkeypatch.setenv(VARIABLE, KEY)
    running.reset()
    running.share, running.leave_at, running.revoke_at = 0.0, None, None
    return running


@pytest.fixture(scope="module")
def folder(tiny_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_inputs(folder, tiny_server.model)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, running):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, KEY)
        run(folder, running, "undisturbed")
    assert running.answered.total() == len(running.answered)
    return Undisturbed(rows(folder / "undisturbed"), len(running.answered))


def config(folder, proxy, **endpoint):
    return values(folder, proxy.url, STAGES, key_variable=VARIABLE, concurrency=CONCURRENCY, **endpoint)


def run(folder, proxy, name, **endpoint):
    """Runs the stages in this process."""
    pipeline.run(from_config_dict(config(folder, proxy, **endpoint)), folder / name)


def start(folder, proxy, name):
    """Starts the command line with a config file. Its output is appended to NAME.out and NAME.err."""
    file = folder / f"{name}.py"
    lines = ["from ml_collections import ConfigDict", f"VALUES = {config(folder, proxy)!r}", "def get_config():",
             "    return ConfigDict(VALUES)"]
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "jaxalign.train", f"--config={file}", f"--workdir={folder / name}"]
    with (folder / f"{name}.out").open("a") as out, (folder / f"{name}.err").open("a") as err:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | ONLY_READ, stdout=out, stderr=err)


def finish(process):
    try:
        return process.wait(60)
    finally:
        process.kill()
        process.wait()


def assert_key_is_absent(workdir, *texts):
    files = [path for path in workdir.rglob("*") if path.is_file()]
    assert {"endpoint.sqlite", "manifest.json"} <= {path.name for path in files}
    secret = KEY.partition("/")[0]  # The same in every encoding of the key.
    for name, content in [*((path, path.read_bytes()) for path in files), *(("output", text.encode()) for text in texts)]:
        assert secret.encode() not in content, name


def output(folder, name):
    return [(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")]


@pytest.mark.slow
def test_faults_in_a_fifth_of_the_requests_do_not_change_the_rows(folder, undisturbed, proxy, capfd):
    proxy.share = 0.2
    run(folder, proxy, "faults", timeout=1.0)
    assert set(proxy.injected) == set(FAULTS) and proxy.injected.total() > 0.15 * proxy.arrived
    assert rows(folder / "faults") == undisturbed.rows
    assert_key_is_absent(folder / "faults", *capfd.readouterr())


@pytest.mark.slow
def test_a_server_that_goes_away_and_returns_does_not_change_the_rows(folder, undisturbed, proxy, capfd):
    proxy.leave_at, proxy.away = undisturbed.requests // 2, 2.0
    run(folder, proxy, "away", max_retries=1)
    out, err = capfd.readouterr()
    assert "[endpoint] paused: " in out and "[endpoint] resumed after " in out
    assert proxy.answered.total() == undisturbed.requests
    assert rows(folder / "away") == undisturbed.rows
    assert_key_is_absent(folder / "away", out, err)


@pytest.mark.slow
def test_a_run_whose_key_is_revoked_ends_with_one_sentence_and_goes_on_with_a_valid_key(
    folder, undisturbed, proxy, capfd
):
    proxy.revoke_at = undisturbed.requests // 2
    assert finish(start(folder, proxy, "revoked")) == 2
    _, error = output(folder, "revoked")
    sentence, = (line for line in error.splitlines() if not line.startswith("["))  # The other lines report progress.
    assert f"rejected the API key in the environment variable {VARIABLE}" in sentence
    assert_key_is_absent(folder / "revoked", *output(folder, "revoked"))

    proxy.revoke_at = None
    run(folder, proxy, "revoked")
    assert proxy.answered.total() == undisturbed.requests
    assert rows(folder / "revoked") == undisturbed.rows
    assert_key_is_absent(folder / "revoked", *capfd.readouterr())


@pytest.mark.slow
def test_killed_runs_pay_at_most_the_requests_in_flight_twice(folder, undisturbed, proxy, capfd):
    choices = random.Random(0)
    for _ in range(KILLS):
        process = start(folder, proxy, "killed")
        enough = proxy.answered.total() + choices.randint(1, undisturbed.requests // (KILLS + 1))
        deadline = time.monotonic() + 60
        while proxy.answered.total() < enough and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(choices.uniform(0, 0.02))
        process.kill()
        assert process.wait() == -9, output(folder, "killed")
    run(folder, proxy, "killed")
    assert len(proxy.answered) == undisturbed.requests
    assert proxy.answered.total() <= undisturbed.requests + KILLS * CONCURRENCY
    assert rows(folder / "killed") == undisturbed.rows
    assert_key_is_absent(folder / "killed", *output(folder, "killed"), *capfd.readouterr())
