"""The URL of a request, and the proxy that it passes."""

from __future__ import annotations

import base64

import pytest

from jaxalign.endpoint.records import CHAT, EndpointRequest
from jaxalign.errors import UserError
from tests.endpoint.clients import VARIABLE, Running, requests
from tests.endpoint.server import Server, status

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_the_query_of_the_url_is_sent_with_each_request(tmp_path):
    with Server() as server, Running(tmp_path, f"{server.url}/?api-version=7") as client:
        client.ask(requests(2))
        assert server.targets == ["/v1/chat/completions?api-version=7"] * 2


def test_a_user_in_the_url_takes_the_place_of_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "sk-0123456789")
    with Server() as server, Running(tmp_path, server.url.replace("//", "//me:secret@")) as client:
        client.ask(requests(1))
        assert server.authorizations == {f"Basic {base64.b64encode(b'me:secret').decode()}": 1}


def test_requests_pass_the_proxy_of_the_environment(tmp_path, monkeypatch):
    with Server() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        with Running(tmp_path, "http://judge.invalid/v1") as client:
            assert len(client.ask(requests(2))) == 2
        assert proxy.targets == ["/v1/chat/completions"] * 2


def test_a_host_of_no_proxy_is_asked_directly(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server, Running(tmp_path, server.url) as client:
        assert len(client.ask(requests(1))) == 1


def test_a_proxy_of_another_protocol_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:9")
    with Running(tmp_path, "http://judge.invalid/v1") as client:
        with pytest.raises(UserError, match="HTTP_PROXY does not name an HTTP proxy"):
            client.ask(requests(1))


def test_a_prompt_with_a_lone_surrogate_is_sent(tmp_path):
    lone = EndpointRequest(CHAT, {"model": "judge", "messages": [{"role": "user", "content": "half \ud83d of a pair"}]})
    with Server(fault_of=lambda *_: status(400, "not Unicode")) as server, Running(tmp_path, server.url) as client:
        with pytest.raises(UserError, match="HTTP 400"):
            client.ask([lone])
        assert server.bodies == [lone.body]
