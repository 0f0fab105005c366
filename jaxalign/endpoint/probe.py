"""Finds out by at most three requests what a server can do.

Servers differ in the fields that they read, and most ignore the fields that they do not know. An ability is therefore concluded
from a reply, not from its acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from jaxalign.endpoint.records import CHAT, COMPLETION, EndpointRequest, Reply

TOP_LOGPROBS = (20, 5)
"""The numbers of log-probabilities that are asked for; 20 is the maximum of OpenAI and the default maximum of vLLM."""
_QUESTION, _BEGUN = "Say hello.", "E"  # A single letter is one token, and no likely answer begins with it.
_TOKEN_IDS = [5, 6, 7]  # Any ids that every vocabulary has.
# Each way to restrict a reply asks for another letter, so that the reply shows which of them the server obeyed.
_GUIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "structured_outputs": ("Q", {"structured_outputs": {"choice": ["Q"]}}),
    "guided_choice": ("J", {"guided_choice": ["J"]}),
    "grammar": ("X", {"grammar": 'root ::= "X"'}),
    "regex": ("Z", {"regex": "Z"}),
}


class Attempts(Protocol):
    """Anything that sends a request which the server may refuse."""

    def attempt(self, request: EndpointRequest) -> Reply | None:
        """The reply; None if the server refuses the request as such, with the status 400, 403, 404, 405, 422 or 501. Other
        failures are repeated or raised, as in `Asks.ask`."""
        ...

    def ask(self, requests: Sequence[EndpointRequest]) -> list[Reply]:
        """One reply per request, in order. A refusal is raised, too."""
        ...


@dataclasses.dataclass(frozen=True)
class Abilities:
    """The abilities of a server with one model.

    Attributes:
      top_logprobs: the number of log-probabilities that the chat shows per token; 0: none, so that verdicts need votes.
      continued: whether an assistant's begun message is continued, with add_generation_prompt=false and
        continue_final_message=true.
      repeats_begun: whether the text of a continued message includes its beginning. Its tokens do not.
      guided: the field that restricts a reply to choices: "structured_outputs", "guided_choice", "grammar" or "regex"; "" if
        none does.
      token_ids: whether logprob_token_ids selects the tokens whose log-probabilities are shown.
      completions: whether completions show log-probabilities; None: not asked, because the chat does.
    """

    top_logprobs: int
    continued: bool = False
    repeats_begun: bool = False
    guided: str = ""
    token_ids: bool = False
    completions: bool | None = None

    def __str__(self) -> str:
        """One sentence for the log."""
        can = [f"shows {self.top_logprobs} log-probabilities per token" if self.top_logprobs else "shows no log-probabilities"]
        can += ["continues a begun answer"] if self.continued else []
        can += [f"restricts replies by {self.guided}"] if self.guided else []
        can += ["shows log-probabilities of chosen tokens"] if self.token_ids else []
        can += ["shows log-probabilities of completions"] if self.completions else []
        return f"The server {', '.join(can[:-1])}{' and ' if can[:-1] else ''}{can[-1]}."


def probe(server: Attempts, model: str) -> Abilities:
    """The abilities of a server, from two or three short requests.

    The first request has standard fields only. If the server refuses it, the second one asks for fewer log-probabilities. If
    the server refuses that, too, the third one asks for none, like a vote, because the reason may be the key, the model or the
    URL. If the
    first reply has none, the second one asks for a completion. Otherwise the second one has the fields by which servers extend
    the chat; a server that refuses it has none of these abilities. An ability that no request asks for counts as absent.

    Args:
      server: sends the requests.
      model: the model's name.

    Raises:
      UserError: the server also refuses a request without log-probabilities.
    """
    most, fewer = TOP_LOGPROBS
    plain = server.attempt(_chat(model, most))
    if plain is None:
        reply = server.attempt(_chat(model, fewer))
        if reply is None:
            vote = {"model": model, "messages": _messages(), "max_tokens": 256, "temperature": 1.0}
            server.ask([EndpointRequest(CHAT, vote)])
            return Abilities(0)
        return Abilities(_shown(reply, fewer))
    shown = _shown(plain, most)
    if not shown:
        body = {"model": model, "prompt": _QUESTION, "max_tokens": 1, "temperature": 0, "logprobs": TOP_LOGPROBS[-1]}
        reply = server.attempt(EndpointRequest(COMPLETION, body))
        return Abilities(0, completions=reply is not None and _shown(reply, TOP_LOGPROBS[-1]) > 0)
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True, "logprob_token_ids": _TOKEN_IDS}
    for _, guide in _GUIDES.values():
        fields |= guide
    extended = server.attempt(EndpointRequest(CHAT, {**_chat(model, shown, _BEGUN).body, **fields}))
    return Abilities(shown) if extended is None else _conclude(plain, extended, shown)


def _messages(begun: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": _QUESTION}, *([{"role": "assistant", "content": begun}] if begun else [])]


def _chat(model: str, top: int, begun: str = "") -> EndpointRequest:
    return EndpointRequest(CHAT, {"model": model, "messages": _messages(begun), "max_tokens": 4, "temperature": 0,
                                  "logprobs": True, "top_logprobs": top})


def _shown(reply: Reply, asked: int) -> int:
    """The number of log-probabilities at the first position. Servers may show one more, of the written token."""
    return min(asked, len(reply.tokens[0].top)) if reply.tokens else 0


def _conclude(plain: Reply, extended: Reply, shown: int) -> Abilities:
    repeats = extended.text.startswith(_BEGUN) and not plain.text.startswith(_BEGUN)
    # A continued beginning of one letter adds one token to the prompt. As a finished turn it also adds the marks of turns.
    added = extended.usage.prompt - plain.usage.prompt if plain.usage.prompt else 0
    rest = extended.text.removeprefix(_BEGUN if repeats else "").strip()
    guided = next((name for name, (letter, _) in _GUIDES.items() if rest == letter), "")
    tokens = extended.tokens or ()
    chosen = len(_TOKEN_IDS) + 1  # The written token is shown, too.
    return Abilities(
        shown,
        continued=repeats or added == 1,
        repeats_begun=repeats,
        guided=guided,
        token_ids=bool(tokens) and shown > chosen and 0 < len(tokens[0].top) <= chosen,
    )
