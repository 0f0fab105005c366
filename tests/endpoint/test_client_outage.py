"""The client during outages: pause, return, several URLs, the end of patience, interruption."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from jaxalign.errors import UserError
from tests.endpoint.clients import Running, requests
from tests.endpoint.server import Server, silence, status, text_of


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def texts(count: int) -> list[str]:
    return [text_of(request.body) for request in requests(count)]


def test_the_client_pauses_while_the_server_is_away_and_resumes_when_it_returns(tmp_path):
    port, replies = free_port(), []
    with Running(tmp_path, f"http://127.0.0.1:{port}/v1", concurrency=8, max_retries=2) as client:
        thread = threading.Thread(target=lambda: replies.extend(client.ask(requests(30))))
        thread.start()
        deadline = time.monotonic() + 10
        while not client.lines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.lines[0].startswith("[endpoint] paused: the connection to") and thread.is_alive()
        with Server(port=port) as server:
            thread.join(20)
            assert not thread.is_alive()
        assert client.lines[-1].startswith("[endpoint] resumed")
    assert [reply.text for reply in replies] == texts(30)
    assert len(server.bodies) == 30


@pytest.mark.medium
def test_a_paused_client_sends_one_probe_at_a_time_at_growing_intervals(tmp_path):
    with Server(fault_of=lambda number, _: status(503) if number < 30 else None) as server:
        with Running(tmp_path, server.url, concurrency=8, max_retries=50) as client:
            client.ask(requests(64))
            assert len(client.lines) == 2
    # 16 failures start the pause. At most 8 more requests are in flight then, so the last 6 failures are probes, with
    # intervals of 0.05, 0.1, 0.2, 0.2, ... seconds.
    assert server.times[30] - server.times[24] > 0.85
    assert server.times[30] - server.times[29] > 0.19
    assert len(server.bodies) == 64 + 30


def test_after_max_down_the_client_gives_up_and_a_repetition_continues(tmp_path):
    is_down = {"now": False}
    with Server(fault_of=lambda number, _: status(503, "loading") if is_down["now"] else None) as server:
        with Running(tmp_path, server.url, concurrency=4, max_down=0.6) as client:
            client.ask(requests(5))
            is_down["now"] = True
            began = time.monotonic()
            with pytest.raises(UserError, match="max_down=0.6 seconds .*loading.*continues from the stored answers"):
                client.ask(requests(20))
            assert 0.5 < time.monotonic() - began < 5
            is_down["now"] = False
            assert [reply.text for reply in client.ask(requests(20))] == texts(20)


def test_a_single_request_waits_for_a_server_that_is_away(tmp_path):
    with Running(tmp_path, f"http://127.0.0.1:{free_port()}/v1", max_retries=1, max_down=0.5) as client:
        began = time.monotonic()
        with pytest.raises(UserError, match="config.endpoint.max_down=0.5"):
            client.ask(requests(1))
        assert time.monotonic() - began > 0.45


def test_a_request_that_always_fails_does_not_stop_for_max_down_while_others_succeed(tmp_path):
    with Server(delay=0.01, fault_of=lambda _, asked: status(503) if "row 3" in str(asked) else None) as server:
        with Running(tmp_path, server.url, concurrency=2, max_retries=4) as client:
            with pytest.raises(UserError, match=r"after \d+ attempts"):
                client.ask(requests(400))
            # On a busy machine its failures may follow each other without a success between, which is a short pause.
            assert all("paused" in line or "resumed after 0." in line for line in client.lines)


@pytest.mark.medium
def test_an_outage_after_a_failure_and_a_success_is_waited_for(tmp_path):
    attempts = []

    async def late_503(request):
        await asyncio.sleep(0.2)
        return await status(503)(request)

    def first_row_fails(_, asked):
        if "row 0" not in str(asked):
            return None
        attempts.append(asked)
        return (status(503) if len(attempts) == 1 else late_503) if len(attempts) <= 8 else None

    with Server(delay=0.05, fault_of=first_row_fails) as server:
        with Running(tmp_path, server.url, concurrency=2, max_retries=2) as client:
            # The other request succeeds between the first and the second failure. The six failures after that are an outage.
            assert [reply.text for reply in client.ask(requests(2))] == texts(2)
            assert [line.split()[1].rstrip(":") for line in client.lines] == ["paused", "resumed"]


def test_two_urls_share_the_requests_and_one_that_dies_loses_none(tmp_path):
    with Server(delay=0.01) as stays:
        with Server(delay=0.01) as dies:
            with Running(tmp_path, stays.url, dies.url, concurrency=8) as client:
                client.ask(requests(100))
                assert min(len(stays.bodies), len(dies.bodies)) > 25
                dies.fault_of = lambda number, _: status(500)
                before = len(dies.bodies)
                assert [reply.text for reply in client.ask(requests(400))] == texts(400)
                # The failing URL is set aside after 3 failures, and probed after growing times.
                assert len(dies.bodies) - before < 60
                assert not client.lines
    assert len(stays.bodies) + before == 400


def test_a_url_that_returns_gets_requests_again(tmp_path):
    with Server(delay=0.01) as one, Server(delay=0.01, fault_of=lambda number, _: status(500) if number < 4 else None) as two:
        with Running(tmp_path, one.url, two.url, concurrency=8) as client:
            client.ask(requests(800))
    assert len(two.bodies) > 60


class Interrupted(BaseException):
    pass


def test_an_interrupt_ends_the_call_and_the_client_works_on(tmp_path):
    import signal

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Server(fault_of=lambda number, _: silence if number >= 4 else None) as server:
            with Running(tmp_path, server.url, concurrency=2, timeout=30.0) as client:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(Interrupted):
                    client.ask(requests(10))
                assert len(client.store) == 4
                server.fault_of = lambda number, _: None
                assert [reply.text for reply in client.ask(requests(10))] == texts(10)
    finally:
        signal.signal(signal.SIGALRM, before)
