"""Failures are classified by what a user or the client can do about them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxalign.endpoint.failures import Fatal, Target, Transient, check_model, classify_status

TARGET = Target("http://host/v1", "judge", "KEY", has_key=True)


def classify(status, error=None, headers=None):
    return classify_status(status, headers or {}, json.dumps({"error": error or {}}), TARGET)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_these_statuses_may_pass(status):
    found = classify(status)
    assert isinstance(found, Transient) and found.kind == f"http_{status}"


@pytest.mark.parametrize(("headers", "seconds"), [
    ({}, None), ({"retry-after": "7"}, 7.0), ({"retry-after": "0"}, None), ({"retry-after": "-3"}, None),
    ({"retry-after": "soon"}, None), ({"retry-after": "nan"}, None), ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
    ({"retry-after-ms": "250", "retry-after": "7"}, 0.25), ({"retry-after-ms": "x", "retry-after": "7"}, 7.0),
])
def test_the_wait_that_the_server_asks_for(headers, seconds):
    assert classify(429, headers=headers).wait == seconds


@pytest.mark.parametrize(("status", "code"), [(402, 402), (402, "invalid_request_error"), (429, "insufficient_quota")])
def test_an_account_without_credit_is_named_as_the_cause(status, code):
    found = classify(status, {"message": "Insufficient credits", "code": code})
    assert isinstance(found, Fatal) and found.kind == "quota" and "add credit" in str(found)


@pytest.mark.parametrize(("model", "named"), [("judge", 'may use model "judge"'), ("", "may use the server,")])
def test_a_rejected_key_names_the_model_that_it_must_be_able_to_use(model, named):
    assert named in str(classify_status(401, {}, "{}", dataclasses.replace(TARGET, model=model)))


# Messages as the servers word them.
@pytest.mark.parametrize(("status", "message"), [
    (400, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."),
    (400, "The decoder prompt (length 9000) is longer than the maximum model length of 8192."),
    (400, "Input length (9000) exceeds model's maximum context length (8192)."),
    (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    (400, "the request exceeds the available context size (4096 tokens), try increasing it"),
    (500, "the request exceeds the available context size. try increasing the context size"),
    (400, "prompt is too long: 210000 tokens > 200000 maximum"),
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    (413, "context window exceeded"),
])
def test_a_request_that_exceeds_the_context_cannot_pass(status, message):
    found = classify(status, {"message": message})
    assert isinstance(found, Fatal) and found.kind == "context" and message in str(found)


@pytest.mark.parametrize("text", ['{"detail": "bad seed"}', '{"message": "bad seed"}', '{"error": "bad seed"}', "bad seed",
                                  '{"object": "error", "message": "bad seed", "code": 400}',
                                  '{"detail": [{"msg": "bad seed"}]}'])
def test_the_message_of_the_server_is_repeated(text):
    found = classify_status(400, {}, text, TARGET)
    assert isinstance(found, Fatal) and "bad seed" in str(found)


def test_a_refusal_of_the_nested_form_is_a_reply():
    found = classify(400, {"code": None, "message": "no", "innererror": {"code": "ResponsibleAIPolicyViolation"}})
    assert found["choices"][0]["finish_reason"] == "content_filter"


@pytest.mark.parametrize(("asked", "stated", "is_same"), [
    ("gpt-4o", "gpt-4o-2024-08-06", True), ("judge", "/models/judge", True), ("org/judge", "judge", True), ("judge", "", True),
    ("judge", "other", False), ("org/judge", "org/other", False), ("judge", "my-judge", False),
])
def test_the_model_of_a_reply_may_be_a_longer_name_of_the_model_that_was_asked(asked, stated, is_same):
    assert (check_model(stated, Target("u", asked, "KEY", True)) is None) == is_same
