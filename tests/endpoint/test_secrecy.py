"""The API key is sent to the server, and appears nowhere else."""

from __future__ import annotations

import io
import json
import logging
import traceback

import pytest

from jaxalign.endpoint.redaction import ApiKey, shown_url
from jaxalign.errors import UserError
from tests.endpoint.clients import KEY, VARIABLE, Running, requests
from tests.endpoint.server import Server, body, cut_off, reply_to, silence, status

ECHO = {"message": f"you sent Bearer {KEY}", "key": KEY}
FAULTS = {
    "401": status(401, ECHO), "404": status(404, ECHO), "400": status(400, ECHO), "500": status(500, ECHO),
    "429": status(429, ECHO), "context": status(400, ECHO | {"code": "context_length_exceeded"}),
    "filter": status(400, ECHO | {"code": "content_filter"}), "garbage": body(f"<html>{KEY}</html>"),
    "echo in a reply": body(json.dumps(reply_to(requests(1)[0].body) | {"headers": KEY})),
    "wrong model": body(json.dumps(reply_to({**requests(1)[0].body, "model": KEY}))),
    "cut off": cut_off, "silence": silence,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_the_key_is_in_no_exception_store_log_or_output(tmp_path, monkeypatch, capfd, fault):
    monkeypatch.setenv(VARIABLE, KEY)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    shown = ""
    try:
        with Server(fault_of=lambda *_: fault) as server:
            with Running(tmp_path, server.url, max_retries=1, timeout=0.2, max_down=0.2) as client:
                client._say = print
                try:
                    client.ask(requests(1))
                except UserError:
                    shown = traceback.format_exc()
                files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
                shown += repr(client.spending.as_dict()) + repr(vars(client))
        assert server.authorizations == {f"Bearer {KEY}": len(server.bodies)}
    finally:
        logging.getLogger().removeHandler(handler)
    out, err = capfd.readouterr()
    for text in (shown, log.getvalue(), out, err, files.decode(errors="replace")):
        for form in (KEY, KEY.replace("/", "\\/"), KEY.partition("/")[0]):
            assert form not in text


def test_a_key_that_is_revoked_in_the_middle_keeps_the_replies_so_far(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    with Server() as server:
        def revoke(number, _):
            server.key = KEY if number < 9 else "another"

        server.key, server.fault_of = KEY, revoke
        with Running(tmp_path, server.url, concurrency=2) as client:
            with pytest.raises(UserError, match=rf"rejected the API key in .*{VARIABLE} .*Bearer \[key\]"):
                client.ask(requests(30))
            stored = len(client.store)
        assert 9 <= stored <= 10 and len(server.bodies) <= 13
        server.key, server.fault_of = KEY, lambda *_: None
        before = len(server.bodies)
        with Running(tmp_path, server.url, concurrency=2) as client:
            client.ask(requests(30))
        assert len(server.bodies) - before == 30 - stored


def test_without_a_key_no_authorization_is_sent_and_the_error_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with Server() as server:
        with Running(tmp_path, server.url) as client:
            client.ask(requests(1))
            assert server.authorizations == {"": 1}
            server.key = KEY
            with pytest.raises(UserError, match=f"none is set in the environment variable {VARIABLE}"):
                client.list_models()


def test_a_short_dummy_key_does_not_damage_text(monkeypatch):
    monkeypatch.setenv(VARIABLE, "EMPTY")
    assert ApiKey(VARIABLE).redact("the list is EMPTY") == "the list is EMPTY"


def test_a_key_with_a_line_break_inside_is_an_error_without_the_key(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sk-one\nsk-two")
    with pytest.raises(UserError, match=VARIABLE) as raised:
        ApiKey(VARIABLE)
    assert "sk-" not in str(raised.value)


def test_messages_show_a_url_without_credentials():
    assert shown_url("https://me:secret@host:8000/v1/?token=x") == "https://host:8000/v1"
