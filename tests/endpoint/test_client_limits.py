"""Limits on requests in flight, rates and money, and the rate that the client reaches."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest

from jaxalign.endpoint.spending import BudgetReached
from jaxalign.errors import UserError
from tests.endpoint.clients import Running, requests
from tests.endpoint.server import Server, body, reply_to, status

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_requests_in_flight_never_exceed_the_concurrency(tmp_path):
    draw = random.Random(0)
    with Server(delay=0.01, fault_of=lambda *_: status(500) if draw.random() < 0.2 else None) as server:
        with Running(tmp_path, server.url, concurrency=7) as client:
            halves = requests(200)[:100], requests(200)[100:]
            threads = [threading.Thread(target=client.ask, args=(half,)) for half in halves]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert server.most == 7


def test_the_requests_per_minute_are_limited(tmp_path):
    with Server() as server, Running(tmp_path, server.url, concurrency=16, requests_per_minute=1200) as client:
        began = time.monotonic()
        client.ask(requests(40))
        assert time.monotonic() - began > 0.9  # 20 at once, then 20 per second


def test_the_tokens_per_minute_are_limited_by_prompt_and_requested_tokens(tmp_path):
    asked = requests(6)
    for request in asked:
        request.body["max_tokens"] = 1000
    with Server() as server, Running(tmp_path, server.url, concurrency=16, tokens_per_minute=180_000) as client:
        began = time.monotonic()
        client.ask(asked)
        assert time.monotonic() - began > 0.9  # 3,000 tokens at once, then 3,000 per second


def test_a_budget_stops_before_the_next_request_and_counts_earlier_runs(tmp_path):
    prices = {"input_price": 12_500.0, "output_price": 25_000.0}  # 10 and 5 tokens per reply: 0.25
    with Server(delay=0.01) as server:
        with Running(tmp_path, server.url, concurrency=2, **prices) as client:
            client.ask(requests(5))
            assert client.spending.as_dict()["money"] == pytest.approx(1.25)
        with Running(tmp_path, server.url, concurrency=2, budget=2.0, **prices) as client:
            with pytest.raises(BudgetReached, match="config.endpoint.budget=2 "):
                client.ask(requests(40))
            spent = client.store.cost()
            assert len(client.store) == len(server.bodies) == spent / 0.25
            assert 2.0 <= spent < 2.0 + 2 * 0.25
            assert len(client.ask(requests(5))) == 5  # stored replies cost nothing


def test_a_budget_needs_the_usage_of_replies(tmp_path):
    reply = body(json.dumps(reply_to(requests(1)[0].body, usage=None)))
    with Server(fault_of=lambda *_: reply) as server:
        with Running(tmp_path, server.url, budget=1.0, input_price=1.0) as client:
            with pytest.raises(UserError, match="does not state the number of tokens"):
                client.ask(requests(1))


PROGRAM = """
import sys
from tests.endpoint.clients import Running, requests
import pathlib
with Running(pathlib.Path(sys.argv[1]), sys.argv[2], concurrency=8) as client:
    client.ask(requests(120))
"""


@pytest.mark.process
def test_a_killed_run_loses_no_more_than_the_requests_in_flight(tmp_path):
    with Server(delay=0.02) as server:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), server.url], env=environment)
        deadline = time.monotonic() + 60
        while len(server.bodies) < 50 and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert 50 <= len(server.bodies) < 120
        with Running(tmp_path, server.url, concurrency=8) as client:
            client.ask(requests(120))
    assert len(server.bodies) <= 120 + 8


@pytest.mark.slow
@pytest.mark.process
def test_the_client_reaches_85_percent_of_the_rate_that_the_concurrency_allows():
    """2,000 requests of 50 ms, 64 at a time: 1.56 s at best. Other programs that use the same cores slow down the client and
    the server; the processor time of the client then shows the rate that it reaches on a core of its own."""
    program = str(ROOT / "benchmarks" / "endpoint_rate.py")
    command = [sys.executable, program, "--requests=2000", "--delay=0.05", "--repeat=3", "--json"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert min(result["seconds"], result["processor_seconds"]) <= 2000 * 0.05 / 64 / 0.85
    assert result["most_in_flight"] == 64
