"""The client gives the replies of a faultless server whatever faults the server has, and asks no more often than needed."""

from __future__ import annotations

import datetime
import email.utils
import json
import random

import pytest

from jaxalign.endpoint.records import CHAT, EndpointRequest
from jaxalign.errors import UserError
from tests.endpoint.clients import Running, requests
from tests.endpoint.server import Server, body, cut_off, reply_to, silence, status, text_of

PASSING = {
    "429 with Retry-After": status(429, "slow down", {"Retry-After": "0.05"}),
    "429 with retry-after-ms": status(429, "slow down", {"retry-after-ms": "50"}),
    "408": status(408), "409": status(409), "500": status(500), "503": status(503),
    "cut-off body": cut_off,
    "garbage": body("<html>gateway</html>"),
    "empty body": body(""),
    "empty choices": body('{"model": "judge", "choices": []}'),
    "another type": body('{"model": "judge", "choices": [{"message": {"content": "x"}, "logprobs": {"content": [7]}}]}'),
}


def expected(asked):
    return [text_of(request.body) for request in asked]


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_a_fault_that_passes_changes_no_reply_and_costs_one_request_each(tmp_path, fault):
    asked = requests(12)
    with Server(fault_of=lambda number, _: fault if number % 4 == 0 else None) as server:
        with Running(tmp_path, server.url, concurrency=4) as client:
            replies = client.ask(asked)
            counts = client.spending.as_dict()
    faults = len(range(0, len(server.bodies), 4))
    assert [reply.text for reply in replies] == expected(asked)
    assert len(server.bodies) == 12 + faults == counts["sent"]
    assert counts["retries"] == faults == sum(counts["failures"].values())
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (120, 60)


def test_a_quarter_of_faults_of_all_kinds_changes_no_reply_and_pauses_nothing(tmp_path):
    draw, kinds = random.Random(1), [*PASSING.values(), silence]
    faults = [draw.choice(kinds) if draw.random() < 0.25 else None for _ in range(2000)]
    with Server(delay=0.01, fault_of=lambda number, _: faults[number]) as server:
        with Running(tmp_path, server.url, concurrency=32, timeout=1.0, max_retries=12) as client:
            assert [reply.text for reply in client.ask(requests(300))] == expected(requests(300))
            assert not client.lines
    assert len(server.bodies) == 300 + sum(fault is not None for fault in faults[: len(server.bodies)])
    assert server.most <= 32


def test_pitfall_24_silence_beyond_the_timeout_is_repeated(tmp_path):
    with Server(fault_of=lambda number, _: silence if number == 0 else None) as server:
        with Running(tmp_path, server.url, timeout=0.3) as client:
            assert [reply.text for reply in client.ask(requests(1))] == expected(requests(1))
    assert len(server.bodies) == 2


def test_a_stored_reply_is_never_asked_again_and_equal_requests_are_sent_once(tmp_path):
    asked = requests(5) + requests(3)
    with Server() as server:
        with Running(tmp_path, server.url) as client:
            first = client.ask(asked)
        with Running(tmp_path, server.url) as client:
            second = client.ask(asked[::-1])
            assert client.spending.as_dict()["stored_hits"] == 5
    assert [reply.text for reply in first] == expected(asked)
    assert second == first[::-1]
    assert len(server.bodies) == 5


def test_a_server_that_asks_to_wait_gets_no_request_in_the_meantime(tmp_path):
    limit = status(429, "slow down", {"Retry-After": "0.4"})
    with Server(fault_of=lambda number, _: limit if number == 2 else None) as server:
        with Running(tmp_path, server.url, concurrency=1) as client:
            client.ask(requests(4))
    assert server.times[3] - server.times[2] >= 0.39


def test_retry_after_may_be_a_date(tmp_path):
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    limit = status(429, "slow down", {"Retry-After": email.utils.format_datetime(then, usegmt=True)})
    with Server(fault_of=lambda number, _: limit if number == 0 else None) as server:
        with Running(tmp_path, server.url) as client:
            client.ask(requests(1))
    assert server.times[1] - server.times[0] >= 0.5  # a date has whole seconds


def test_a_server_that_asks_to_wait_longer_than_max_down_ends_the_run(tmp_path):
    with Server(fault_of=lambda number, _: status(429, "tomorrow", {"Retry-After": "86400"})) as server:
        with Running(tmp_path, server.url) as client:
            with pytest.raises(UserError, match="asks to wait 86.* config.endpoint.max_down"):
                client.ask(requests(1))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("max_retries", [0, 3])
def test_pitfall_24_a_request_is_sent_once_and_max_retries_times_more(tmp_path, max_retries):
    with Server(fault_of=lambda number, _: status(500)) as server:
        with Running(tmp_path, server.url, max_retries=max_retries) as client:
            with pytest.raises(UserError, match=f"config.endpoint.max_retries={max_retries}"):
                client.ask(requests(1))
    assert len(server.bodies) == max_retries + 1


def test_a_refusal_of_a_content_filter_is_a_stored_reply(tmp_path):
    filtered = {"choices": [{"finish_reason": "content_filter", "message": {"role": "assistant", "content": None}}]}
    faults = [
        status(400, {"code": "content_filter", "message": "policy"}),
        status(400, {"code": "content_policy_violation", "message": "policy"}),
        body(json.dumps(reply_to(requests(3)[2].body, **filtered))),
    ]
    with Server(fault_of=lambda number, _: faults[number]) as server:
        with Running(tmp_path, server.url, concurrency=1) as client:
            replies = client.ask(requests(3))
            assert client.spending.as_dict()["content_filter"] == 3
        with Running(tmp_path, server.url, offline=True) as client:
            assert client.ask(requests(3)) == replies
    assert [(reply.text, reply.finish) for reply in replies] == [("", "content_filter")] * 3
    assert len(server.bodies) == 3


FATAL = {
    "401": (status(401, "no such key"), "environment variable JAXALIGN_TEST_KEY .*no such key"),
    "403": (status(403, "not yours"), "environment variable JAXALIGN_TEST_KEY .*not yours"),
    "404": (status(404, "no model judge"), "config.endpoint.url .* config.endpoint.model"),
    "quota": (status(429, {"code": "insufficient_quota", "message": "pay"}), "no quota left"),
    "context, OpenAI": (status(400, {"code": "context_length_exceeded", "message": "too long"}), "exceeds the context"),
    "context, vLLM": (status(400, "This model's maximum context length is 2048 tokens."), "exceeds the context"),
    "context, llama.cpp": (status(400, "the request exceeds the available context size (512)"), "exceeds the context"),
    "context, SGLang": (status(400, "The input (9 tokens) is longer than the model's context length"), "exceeds the context"),
    "other 400": (status(400, "logit_bias is odd"), 'HTTP 400: "logit_bias is odd"'),
    "422": (status(422, "seed is odd"), 'HTTP 422: "seed is odd"'),
    "another model": (body(json.dumps(reply_to({**requests(1)[0].body, "model": "other"}))), 'with model "other"'),
}


@pytest.mark.parametrize(("fault", "sentence"), FATAL.values(), ids=FATAL.keys())
def test_a_failure_that_cannot_pass_ends_the_call_at_once_and_keeps_the_replies(tmp_path, fault, sentence):
    with Server(fault_of=lambda number, _: fault if number == 3 else None) as server:
        with Running(tmp_path, server.url, concurrency=1) as client:
            with pytest.raises(UserError, match=sentence) as raised:
                client.ask(requests(6))
            assert len(client.store) == 3
    assert len(server.bodies) == 4
    assert raised.value.__cause__ is None and raised.value.__context__ is None


def test_pitfall_27_replies_in_flight_are_stored_before_a_failure_ends_the_call(tmp_path):
    with Server(delay=0.3, fault_of=lambda number, _: status(400, "odd") if number == 5 else None) as server:
        with Running(tmp_path, server.url, concurrency=6) as client:
            with pytest.raises(UserError, match="odd"):
                client.ask(requests(20))
            assert len(client.store) == 5
    assert len(server.bodies) == 6


@pytest.mark.parametrize("name", ["judge-2026-01-31", "org/judge", "/models/judge", "Judge"])
def test_a_server_may_answer_with_a_dated_name_or_a_path(tmp_path, name):
    fault = body(json.dumps(reply_to({**requests(1)[0].body, "model": name})))
    with Server(fault_of=lambda number, _: fault) as server, Running(tmp_path, server.url) as client:
        assert client.ask(requests(1))[0].model == name


def test_offline_answers_from_the_store_and_counts_the_missing_replies(tmp_path):
    with Server() as server:
        with Running(tmp_path, server.url) as client:
            stored = client.ask(requests(2))
        with Running(tmp_path, server.url, offline=True) as client:
            assert client.ask(requests(2)) == stored
            with pytest.raises(UserError, match="3 of 5 requests have no stored reply"):
                client.ask(requests(5))
            with pytest.raises(UserError, match="offline=True"):
                client.list_models()
    assert len(server.bodies) == 2


def test_list_models_names_the_models_of_the_server(tmp_path):
    with Server() as server, Running(tmp_path, server.url) as client:
        assert client.list_models() == ["judge"]


@pytest.mark.parametrize("urls", [(), ("localhost:8000/v1",), ("http:///v1",)])
def test_a_url_that_is_no_base_url_is_an_error_at_once(tmp_path, urls):
    with pytest.raises(UserError, match="config.endpoint.url"):
        Running(tmp_path, *urls)


def test_a_sample_with_another_seed_is_another_request(tmp_path):
    one = requests(1)[0]
    two = EndpointRequest(CHAT, {**one.body, "seed": 2})
    with Server() as server, Running(tmp_path, server.url) as client:
        client.ask([one, two, one])
    assert len(server.bodies) == 2
