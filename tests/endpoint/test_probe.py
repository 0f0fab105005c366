"""Abilities of servers: scripted ones that answer as the named servers did, and a real one."""

from __future__ import annotations

import dataclasses

import pytest

from jaxalign.endpoint.probe import Abilities, probe
from jaxalign.endpoint.records import CHAT, Alternative, EndpointRequest, Reply, Token, Usage
from jaxalign.errors import UserError

STANDARD = {"model", "messages", "prompt", "max_tokens", "temperature", "logprobs", "top_logprobs"}


@dataclasses.dataclass
class Scripted:
    """A server that reads some fields and ignores the others, or refuses requests with others.

    limit: the largest accepted top_logprobs; 0: log-probabilities are not shown. reads: the extensions that it reads.
    strict: whether it refuses fields that it does not read. continues: whether it continues a begun answer unasked.
    """

    limit: int = 20
    reads: tuple[str, ...] = ()
    strict: bool = False
    continues: bool = False
    completions: bool = False
    requests: list[EndpointRequest] = dataclasses.field(default_factory=list)

    def attempt(self, request: EndpointRequest) -> Reply | None:
        self.requests.append(request)
        body = request.body
        asked = body.get("top_logprobs", 0) if request.path == CHAT else body["logprobs"]
        if self.strict and not set(body) <= STANDARD | set(self.reads) or 0 < self.limit < asked:
            return None
        begun = request.path == CHAT and body["messages"][-1]["role"] == "assistant"
        text = self._restricted(body) or "Hello"
        continued = self.continues or "continue_final_message" in self.reads
        prompt = 10 + (1 if continued else 6) * begun
        shows = self.limit if request.path == CHAT else self.completions
        count = len(body["logprob_token_ids"]) + 1 if "logprob_token_ids" in self.reads and begun else asked
        top = tuple(Alternative(b"%d" % i, -1.0 - i) for i in range(count))
        text = body["messages"][-1]["content"] + text if begun and self.continues else text
        return Reply(text, "stop", (Token(top[0], top),) if shows and top else None, Usage(prompt, 1))

    def ask(self, requests):
        replies = [self.attempt(request) for request in requests]
        if None in replies:
            raise UserError("refused")
        return replies

    def _restricted(self, body) -> str:
        fields = {"structured_outputs": lambda value: value["choice"][0], "guided_choice": lambda value: value[0],
                  "grammar": lambda value: value.split('"')[1], "regex": str}
        return next((read(body[name]) for name, read in fields.items() if name in body and name in self.reads), "")


SERVERS = {
    "vLLM": (
        Scripted(reads=("structured_outputs", "continue_final_message", "add_generation_prompt", "logprob_token_ids")),
        Abilities(20, continued=True, guided="structured_outputs", token_ids=True),
    ),
    "vLLM, older": (
        Scripted(limit=5, reads=("guided_choice", "continue_final_message", "add_generation_prompt")), Abilities(5),
    ),
    "SGLang": (
        Scripted(reads=("regex", "continue_final_message")), Abilities(20, continued=True, guided="regex"),
    ),
    "llama.cpp": (
        Scripted(limit=10**6, reads=("grammar",), continues=True),
        Abilities(20, continued=True, repeats_begun=True, guided="grammar"),
    ),
    "OpenAI": (Scripted(strict=True), Abilities(20)),
    "ignores extensions": (Scripted(), Abilities(20)),
    "transformers": (Scripted(limit=0, strict=True), Abilities(0, completions=False)),
    "completions only": (Scripted(limit=0, completions=True), Abilities(0, completions=True)),
    "refuses log-probabilities": (Scripted(limit=1), Abilities(0)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_pitfall_23_abilities_follow_from_at_most_three_requests(name):
    server, expected = SERVERS[name]
    assert probe(server, "model") == expected
    assert len(server.requests) == (3 if name == "refuses log-probabilities" else 2)
    assert all(request.body["model"] == "model" for request in server.requests)
    if name == "refuses log-probabilities":  # The last request is sent in the form of a vote.
        assert server.requests[-1].body.keys() == {"model", "messages", "max_tokens", "temperature"}
        assert server.requests[-1].body["temperature"] == 1.0


def test_a_server_that_refuses_every_request_has_no_abilities_to_store():
    """A wrong key, model or URL is not mistaken for a server without log-probabilities."""
    class Refusing(Scripted):
        def attempt(self, request):
            return None

    with pytest.raises(UserError, match="refused"):
        probe(Refusing(), "model")


def test_an_answer_that_begins_like_the_begun_one_does_not_count_as_continued():
    class Echo(Scripted):
        def attempt(self, request):
            return dataclasses.replace(super().attempt(request), text="Ello")

    assert not probe(Echo(), "model").continued


def test_the_real_server_continues_and_restricts_its_replies(tiny_server):
    assert probe(tiny_server.server, "tiny") == Abilities(20, continued=True, repeats_begun=True, guided="grammar")


@pytest.mark.parametrize(
    "abilities, sentence",
    [
        (Abilities(0, completions=False), "The server shows no log-probabilities."),
        (Abilities(5), "The server shows 5 log-probabilities per token."),
        (Abilities(20, continued=True, guided="grammar"),
         "The server shows 20 log-probabilities per token, continues a begun answer and restricts replies by grammar."),
    ],
)
def test_a_sentence_for_the_log(abilities, sentence):
    assert str(abilities) == sentence
