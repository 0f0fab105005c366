"""The judge behind a real server, against the judge that runs the same model in this process."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxalign.config import EndpointConfig, FeedbackConfig, from_config_dict
from jaxalign.data.chat.requests import load_set
from jaxalign.endpoint.client import Client
from jaxalign.endpoint.probe import Abilities
from jaxalign.endpoint.records import Alternative, Reply, Token
from jaxalign.endpoint.store import AnswerStore
from jaxalign.errors import UserError
from jaxalign.feedback.endpoint_judge import EndpointJudge
from jaxalign.feedback.judge import ComparisonRequest, CritiqueRequest, Draw, RatingRequest
from jaxalign.feedback.local import make_local_judge
from jaxalign.models.language_model import load_model
from jaxalign.records import Message, Principle
from jaxalign.rollout.sampling import Sampling

RULE = Principle("kindness", "Is the answer kind?", "Write a kind answer.", "Which answer is kinder?")
ANSWERS = ("Answer A is better.", "No.", "Which?", "Answer B is shorter.")
SETTINGS = dataclasses.replace(FeedbackConfig(), reasoning=False, max_outside_mass=1.0)
ALL = Abilities(1000)  # llama.cpp shows any number of tokens.


def asked(kind, count=6):
    dialogue = (Message("user", "Is A or B better?"),)
    if kind is ComparisonRequest:
        return [kind(dialogue, ANSWERS[i % 4], ANSWERS[(i + 1 + i // 4) % 4], RULE) for i in range(count)]
    return [kind(dialogue, ANSWERS[i % 4], RULE) for i in range(count)]


def draw(count, seed=0):
    return Draw(jax.random.key(seed), range(count))


@pytest.fixture
def client(tiny_server, tmp_path):
    store = AnswerStore(tmp_path / "answers.sqlite")
    with Client(EndpointConfig(url=(tiny_server.server.url,), concurrency=4), store) as client:
        yield client
    store.close()


def judge(client, abilities=ALL, votes=4, **settings):
    writing = Sampling(12, (), 1.0)
    return EndpointJudge(client, client.list_models()[0], abilities, load_set("chat"),
                         dataclasses.replace(SETTINGS, **settings), votes, writing)


@pytest.fixture(scope="module")
def local(tiny_server):
    found = load_model(tiny_server.model, max_length=512)
    return make_local_judge(found.model, found.params, found.tokenizer, SETTINGS, 512, 8)


def test_comparisons_equal_those_of_the_judge_in_this_process(client, local):
    requests = asked(ComparisonRequest)
    found, expected = (each.compare(requests, draw(6)) for each in (judge(client), local))
    for field in ("probability", "tie", "outside"):
        # The spelling " a" has two tokens, and the server shows the second one only if it wrote the first.
        np.testing.assert_allclose([getattr(v, field) for v in found], [getattr(v, field) for v in expected], atol=5e-3)
    assert {verdict.notes for verdict in found} == {("top_logprobs",)}


def test_ratings_equal_those_of_the_judge_in_this_process(client, local):
    requests = asked(RatingRequest, 4)
    found, expected = (each.rate(requests, draw(4)) for each in (judge(client), local))
    np.testing.assert_allclose([r.rating for r in found], [r.rating for r in expected], atol=0.05)


def test_without_log_probabilities_the_label_is_the_share_of_sampled_answers(client):
    found = judge(client, Abilities(0), votes=8).compare(asked(ComparisonRequest, 3), draw(3))
    for verdict in found:
        assert verdict.notes == ("votes",) and 0 <= verdict.outside <= 1
        if verdict.probability is None:
            assert verdict.problem == "unreadable"
        else:
            readable = round(8 * (1 - verdict.outside))
            assert (2 * readable * verdict.probability) % 1 == pytest.approx(0, abs=1e-6)
    assert client.spending.as_dict()["sent"] == 1 + 3 * 8  # The first one lists the models.


def test_texts_depend_on_the_row_and_not_on_the_other_requests(client):
    requests = asked(CritiqueRequest)
    asker = judge(client)
    together = asker.critique(requests, draw(6))
    alone = asker.critique([requests[4]], Draw(jax.random.key(0), [4]))
    assert alone == [together[4]] and client.spending.as_dict()["sent"] == 1 + 6
    other = asker.critique([requests[4]], Draw(jax.random.key(1), [4]))
    assert other != alone


def test_equal_verdicts_are_asked_once(client):
    requests = asked(ComparisonRequest, 2)
    judge(client).compare([requests[0]] * 5 + [requests[1]], draw(6))
    assert client.spending.as_dict()["sent"] == 1 + 2


class Recorded:
    """Answers "A" to every request, with certainty, and keeps the bodies."""

    def __init__(self):
        self.bodies = []

    def ask(self, requests):
        self.bodies += [request.body for request in requests]
        certain = Alternative(b"A", 0.0)
        return [Reply("A", "stop", (Token(certain, (certain,)),))] * len(requests)


@pytest.mark.parametrize(("thinking", "in_texts", "in_verdicts"), [("auto", None, None), ("on", True, False),
                                                                   ("off", False, False)])
def test_a_reasoning_model_does_not_think_before_a_verdict_without_reasoning(thinking, in_texts, in_verdicts):
    asks = Recorded()
    settings = dataclasses.replace(SETTINGS, thinking=thinking)
    asker = EndpointJudge(asks, "judge", ALL, load_set("chat"), settings, 4, Sampling(12, (), 1.0))
    asker.critique(asked(CritiqueRequest, 1), draw(1))
    asker.compare(asked(ComparisonRequest, 1), draw(1))
    sent = [body.get("chat_template_kwargs", {}).get("enable_thinking") for body in asks.bodies]
    assert sent == [in_texts, in_verdicts]


@pytest.mark.parametrize(("abilities", "sent"), [(ALL, 2), (Abilities(0), 8)])
def test_thoughts_that_leave_no_space_for_a_verdict_are_named(abilities, sent):
    """A server that separates thoughts may answer with thoughts only. The log-probabilities are those of the thoughts."""
    class Thinks(Recorded):
        def ask(self, requests):
            word = Alternative(b"Okay", 0.0)
            thoughts = Reply("", "length", (Token(word, (word,)),), reasoning="Okay, the user")
            return [thoughts for _ in super().ask(requests)]

    asks = Thinks()
    asker = EndpointJudge(asks, "judge", abilities, load_set("chat"), SETTINGS, 4)
    found = asker.compare(asked(ComparisonRequest, 2), draw(2))
    assert [verdict.problem for verdict in found] == ["cut_off"] * 2
    assert len(asks.bodies) == sent


def test_thinking_can_be_switched_off_for_verdicts_only():
    fields = {"stages": ("compare",), "model": {"source": "huggingface", "path": "m"},
              "data": {"source": "prompts_jsonl", "red_team": "p.jsonl"}, "endpoint": {"url": ("http://localhost:8000/v1",)}}
    from_config_dict({**fields, "feedback": {"judge": "endpoint", "thinking": "off"}})
    with pytest.raises(UserError, match="feedback.thinking is 'on', but no stage asks"):
        from_config_dict({**fields, "feedback": {"judge": "endpoint", "thinking": "on"}})
