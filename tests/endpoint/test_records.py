"""Replies of a server with impossible numbers are malformed."""

from __future__ import annotations

import pytest

from jaxalign.endpoint import exchange, failures, records, transport

_TARGET = failures.Target("http://localhost:1/v1", "m", "KEY", False)


def reply(path, body):
    call = exchange.Call(path, {}, lambda raw: records.read_reply(path, raw), lambda reply, text, target: reply)
    return exchange._interpret(transport.HTTPResponse(200, {}, body), call, _TARGET)


def chat(logprob="-0.1", data="[65]", tokens="5"):
    token = f'{{"token": "A", "logprob": {logprob}, "bytes": {data}, "top_logprobs": []}}'
    return (f'{{"choices": [{{"message": {{"content": "A"}}, "logprobs": {{"content": [{token}]}}}}], '
            f'"usage": {{"prompt_tokens": {tokens}}}}}')


def completion(logprob="-0.1"):
    return f'{{"choices": [{{"text": "A", "logprobs": {{"tokens": ["A"], "token_logprobs": [{logprob}]}}}}]}}'


@pytest.mark.parametrize(("path", "body"), [
    (records.CHAT, chat(logprob="1e308")), (records.CHAT, chat(logprob="NaN")), (records.CHAT, chat(data="1000000000000")),
    (records.CHAT, chat(tokens="1e400")), ("/completions", completion("7")),
])
def test_an_impossible_number_makes_a_reply_malformed(path, body):
    assert "sent a malformed reply" in str(reply(path, body))


@pytest.mark.parametrize(("path", "body"), [
    (records.CHAT, chat()), (records.CHAT, chat("0.001")), (records.CHAT, chat("-Infinity")), ("/completions", completion()),
])
def test_a_possible_one_is_read(path, body):
    assert reply(path, body).text == "A"
