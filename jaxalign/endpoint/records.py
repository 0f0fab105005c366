"""The requests to an OpenAI-compatible server, and its replies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

CHAT, COMPLETION = "chat/completions", "completions"


class MalformedReply(Exception):
    """A reply lacks a field that every reply of its path has; the text names it."""


@dataclasses.dataclass(frozen=True)
class EndpointRequest:
    """One request.

    Attributes:
      path: CHAT or COMPLETION.
      body: the whole JSON body, with "model" and, if the reply is sampled, "seed". Equal bodies have equal replies: a second
        sample needs another seed.
    """

    path: str
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The SHA-256 hash of the path and the canonical JSON of the body, as 64 hexadecimal digits."""
        text = json.dumps([self.path, self.body], sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


class Alternative(NamedTuple):
    """A token at a position with its log-probability in nats. data: its bytes in UTF-8, as the server states them, or as its
    text has them."""

    data: bytes
    logprob: float


class Token(NamedTuple):
    """A token of a reply: itself, and the most likely tokens at its position, which need not include it."""

    own: Alternative
    top: tuple[Alternative, ...]


class Usage(NamedTuple):
    """The number of tokens that the server counted."""

    prompt: int = 0
    completion: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
    """A server's reply.

    Attributes:
      text: the text of its first choice; "" if a content filter refused the request.
      finish: "stop", "length", "content_filter", or another name that the server gives.
      tokens: the tokens of the text with log-probabilities; None if the server states none.
      usage: the tokens that the server counted.
      model: the model's name in the reply.
      reasoning: the thoughts of a reasoning model, if the server separates them from the text.
    """

    text: str
    finish: str
    tokens: tuple[Token, ...] | None = None
    usage: Usage = Usage()
    model: str = ""
    reasoning: str | None = None


class Asks(Protocol):
    """Anything that answers requests, such as `jaxalign.endpoint.client.Client`."""

    def ask(self, requests: Sequence[EndpointRequest]) -> list[Reply]:
        """One reply per request, in order."""
        ...


def read_reply(path: str, raw: Mapping[str, Any]) -> Reply:
    """The reply in a response body.

    Raises:
      MalformedReply: the body has no choices, its first choice has no text, or a log-probability is above 0 or NaN.
    """
    choices = raw.get("choices") if isinstance(raw, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise MalformedReply("the reply has no choices")
    choice, usage = choices[0], raw.get("usage") or {}
    message = choice.get("message") if path == CHAT else {"content": choice.get("text")}
    finish = choice.get("finish_reason") or "stop"
    if not isinstance(message, Mapping):
        raise MalformedReply("the first choice has no message")
    text, thoughts = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    if text is None and (finish == "content_filter" or thoughts or message.get("refusal")):
        text = message.get("refusal") or ""
    if not isinstance(text, str):
        raise MalformedReply("the first choice has no text")
    counted = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    return Reply(text, finish, _read_tokens(path, choice), counted, str(raw.get("model") or ""), thoughts)


def _read_tokens(path: str, choice: Mapping[str, Any]) -> tuple[Token, ...] | None:
    """The tokens of a choice in the form of a chat, which completions may have, or in that of completions."""
    shown = choice.get("logprobs") or {}
    if content := shown.get("content"):
        return tuple(Token(_alternative(item), tuple(map(_alternative, item.get("top_logprobs") or ()))) for item in content)
    texts, own, top = shown.get("tokens"), shown.get("token_logprobs"), shown.get("top_logprobs")
    if path == CHAT or not texts or own is None:
        return None
    top = top or [{}] * len(texts)
    return tuple(
        Token(
            Alternative(text.encode(), float("-inf") if logprob is None else _logprob(logprob)),
            tuple(Alternative(name.encode(), _logprob(value)) for name, value in (others or {}).items()),
        )
        for text, logprob, others in zip(texts, own, top, strict=True)
    )


def _alternative(item: Mapping[str, Any]) -> Alternative:
    data = item.get("bytes")
    # A list, since `bytes` of a number allocates as many bytes.
    return Alternative(bytes(list(data)) if data is not None else item["token"].encode(), _logprob(item["logprob"]))


def _logprob(value: Any) -> float:
    number = float(value)
    if not number <= _ROUNDING:
        raise MalformedReply(f"a log-probability is {number}, and at most 0 is expected")
    return number


_ROUNDING = 0.1  # A server that computes in half precision may report a log-probability slightly above 0.
