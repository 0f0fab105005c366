"""The judge behind an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxalign.config import FeedbackConfig
from jaxalign.data.chat.requests import TemplateSet
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.files import thinking_variables
from jaxalign.endpoint import options
from jaxalign.endpoint.probe import Abilities
from jaxalign.endpoint.records import CHAT, Asks, EndpointRequest, Reply
from jaxalign.errors import UserError
from jaxalign.feedback.contract import Contract, read_contract
from jaxalign.feedback.judge import ComparisonRequest, Draw, Rating, RatingRequest, Text, Verdict, template_values
from jaxalign.rollout.sampling import Sampling

_VERDICT_TOKENS = 8  # Space for an option of several tokens, and for blanks before it.


@dataclasses.dataclass(frozen=True)
class ChatMessages:
    """Writes the messages of requests.

    Attributes:
      templates: a template set with the layout "chat".
      settings: whether the judge reasons before a verdict, and whether it may answer with a tie.
    """

    templates: TemplateSet
    settings: FeedbackConfig

    @functools.cached_property
    def contract(self) -> Contract:
        """The form of the judge's answers."""
        return read_contract(self.templates.form, f"the template set {self.templates.name}")

    @property
    def ties(self) -> bool:
        """Whether the judge may say that neither of two answers is better."""
        return bool(self.contract.tie) if self.settings.ties is None else self.settings.ties

    def options(self, kind: str) -> tuple[str, ...]:
        """The answers to a request of the kind "comparison" or "rating"."""
        if kind == "rating":
            return self.contract.ratings
        return (*self.contract.options, *([self.contract.tie] if self.ties else []))

    def write(self, kind: str, request: Any) -> list[dict[str, str]]:
        """The messages of a request, each with "role" and "content".

        Args:
          kind: "critique", "revision", "comparison" or "rating".
          request: the request of the judge's method of this kind (`jaxalign.feedback.judge`).

        Raises:
          DialogueRefused: the template refuses the request.
          UserError: the template begins the judge's answer, which a server cannot continue.
        """
        values: dict[str, Any] = template_values(request)
        values |= {"reasoning": bool(self.settings.reasoning)} if kind in ("comparison", "rating") else {}
        values |= {"ties": self.ties} if kind == "comparison" else {}
        messages, _, begin = self.templates.render(kind, request.messages, request.principle, **values)
        if begin.strip():
            raise UserError(f"{kind}.jinja of the template set {self.templates.name} begins the judge's answer with "
                            f"{begin.strip()[:40]!r}, which an endpoint cannot continue; leave the answer block empty")
        return [{"role": message.role, "content": message.content} for message in messages]


class _OptionShares(NamedTuple):
    """One verdict or rating. shares: the probability of each option, normalised, float64 [O]; None if there is a problem."""

    shares: np.ndarray | None
    outside: float | None = None
    reasoning: str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EndpointJudge:
    """A `Judge` that asks a server.

    A verdict is read from the log-probabilities of the options, if the server gives them, and else from sampled answers
    (`votes`). The notes of a result name the way: "top_logprobs" or "votes".

    Attributes:
      asks: sends the requests.
      model: the model's name on the server.
      abilities: what the server can do.
      templates: a template set with the layout "chat".
      settings: the reasoning, its length and temperature, ties, thinking, and the limit of the outside mass.
      votes: the number of sampled answers per verdict, for a server without log-probabilities.
      writing: sampling settings for critiques and revisions; None if they are never requested.
    """

    asks: Asks
    model: str
    abilities: Abilities
    templates: TemplateSet
    settings: FeedbackConfig
    votes: int
    writing: Sampling | None = None
    name = "endpoint"

    @functools.cached_property
    def writer(self) -> ChatMessages:
        """Writes the messages of the requests."""
        return ChatMessages(self.templates, self.settings)

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> list[Verdict]:
        """The probability of the first option, normalised over all options; a tie counts one half."""
        out = []
        for read in self._read("comparison", requests, draw):
            probability = tie = None
            if read.shares is not None:
                tie = float(read.shares[2]) if self.writer.ties else None
                probability = float(read.shares[0] + (tie or 0.0) / 2)
            out.append(Verdict(probability, read.reasoning, read.problem, read.outside, read.notes, tie=tie))
        return out

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> list[Rating]:
        """The expectation over the ratings 1 to 10, normalised over all ratings."""
        out = []
        for read in self._read("rating", requests, draw):
            rating = None if read.shares is None else float(read.shares @ np.arange(1, 11))
            out.append(Rating(rating, read.reasoning, read.problem, read.outside, read.notes))
        return out

    def _texts(self, kind: str, requests: Sequence[Any], draw: Draw) -> list[Text]:
        if self.writing is None:
            raise UserError("the judge has no sampling settings for critiques and revisions; pass `writing` to EndpointJudge")
        settings: dict[str, Any] = {"max_tokens": self.writing.max_new_tokens, "temperature": self.writing.temperature}
        settings |= {"top_p": self.writing.top_p} if self.writing.top_p < 1 else {}
        written = [self._messages(kind, request) for request in requests]
        asked = [i for i, messages in enumerate(written) if messages is not None]
        settings |= _thinking(self.settings.thinking)
        replies = self._ask([written[i] for i in asked], settings, [_seed(draw.key, draw.rows[i]) for i in asked])
        out = [Text("", False, "template")] * len(requests)
        for i, reply in zip(asked, replies, strict=True):
            cleaned = self.writer.contract.clean(reply.text, reply.finish != "length")
            refused = reply.finish == "content_filter" or self.writer.contract.declines(cleaned.text, kind)
            reasoning = reply.reasoning if cleaned.reasoning is None else cleaned.reasoning
            out[i] = Text(cleaned.text, cleaned.complete, "refused" if refused else None, reasoning, cleaned.notes)
        return out

    critique = functools.partialmethod(_texts, "critique")
    revise = functools.partialmethod(_texts, "revision")

    def _read(self, kind: str, requests: Sequence[Any], draw: Draw) -> list[_OptionShares]:
        """The options' probabilities in the answer to each request, or the reason why there are none."""
        reasons = bool(self.settings.reasoning)
        # A verdict without reasoning has no space for thoughts.
        shared = {"max_tokens": verdict_tokens(self.settings)}
        shared |= _thinking("off" if self.settings.thinking == "on" and not reasons else self.settings.thinking)
        written = [self._messages(kind, request) for request in requests]
        asked = [i for i, messages in enumerate(written) if messages is not None]
        out = [_OptionShares(None, problem="template")] * len(requests)
        if self.abilities.top_logprobs:
            settings = shared | {
                "temperature": self.settings.reasoning_temperature if reasons else 0.0,
                "logprobs": True, "top_logprobs": self.abilities.top_logprobs,
            }
            replies = self._ask([written[i] for i in asked], settings, [_seed(draw.key, draw.rows[i]) for i in asked])
            for i, reply in zip(asked, replies, strict=True):
                out[i] = self._verdict(kind, reply, reasons)
            asked = [i for i in asked if out[i].shares is None and out[i].problem is None]
        if asked:
            settings = shared | {"temperature": 1.0}
            each = [written[i] for i in asked for _ in range(self.votes)]
            seeds = [_seed(draw.key, draw.rows[i], 1 + vote) for i in asked for vote in range(self.votes)]
            replies = self._ask(each, settings, seeds)
            for k, i in enumerate(asked):
                out[i] = self._vote(kind, replies[k * self.votes : (k + 1) * self.votes], reasons)
        return out

    def _verdict(self, kind: str, reply: Reply, reasons: bool) -> _OptionShares:
        """The verdict in the log-probabilities of a reply. Without one and without a problem, votes are needed."""
        thoughts, problem = self._thoughts(kind, reply, reasons)
        if problem is not None or not reply.tokens:
            return _OptionShares(None, reasoning=thoughts, problem=problem)
        end = self.writer.contract.thinking[1] if self.writer.contract.thinking else ""
        place = options.find_verdict(reply.tokens, self.writer.contract.marker(kind) if reasons else "", end)
        spellings = options.spell(self.writer.options(kind), self.writer.contract.spellings)
        read = place and options.read_options(reply.tokens[place.index :], spellings, place.head)
        if read is None:
            return _OptionShares(None, reasoning=thoughts)
        notes = ("top_logprobs", *(["option_missing"] if read.missing else []))
        if read.outside > self.settings.max_outside_mass:
            return _OptionShares(None, read.outside, thoughts, "unreadable", notes)
        shares = np.exp(read.logprobs)
        return _OptionShares(shares / shares.sum(), read.outside, thoughts, None, notes)

    def _vote(self, kind: str, replies: Sequence[Reply], reasons: bool) -> _OptionShares:
        """The verdict of sampled replies, with the reasoning of the first usable one."""
        thoughts, texts, problems = None, [], []
        for reply in replies:
            own, problem = self._thoughts(kind, reply, reasons)
            problems.append(problem)
            if problem is None:
                thoughts = own if thoughts is None else thoughts
                texts.append(self.writer.contract.clean(reply.text, True).text)
        names = [self.writer.contract.spellings(name) for name in self.writer.options(kind)]
        votes = options.count_votes(texts, names, self.writer.contract.marker(kind) if reasons else "")
        unreadable = 1 - sum(votes.counts) / len(replies)
        if votes.shares is None:
            problem = next((problem for problem in problems if problem), "unreadable")
            return _OptionShares(None, unreadable, thoughts, problem, ("votes",))
        if unreadable > self.settings.max_outside_mass:
            return _OptionShares(None, unreadable, thoughts, "unreadable", ("votes",))
        return _OptionShares(np.asarray(votes.shares), unreadable, thoughts, None, ("votes",))

    def _thoughts(self, kind: str, reply: Reply, reasons: bool) -> tuple[str | None, str | None]:
        """(the reasoning before the verdict, the problem that prevents a verdict)."""
        if reply.finish == "content_filter":
            return None, "refused"
        if not reasons:
            # The server separates thoughts, and they left no space for the verdict.
            only_thoughts = reply.reasoning and reply.finish == "length" and not reply.text.strip()
            return reply.reasoning, "cut_off" if only_thoughts else None
        text, decided = self.writer.contract.before_verdict(reply.text, kind)
        cleaned = self.writer.contract.clean(text, decided or reply.finish != "length")
        if self.writer.contract.declines(cleaned.text, "verdict"):
            return cleaned.text, "refused"
        return cleaned.text, None if cleaned.complete else "cut_off"

    def _messages(self, kind: str, request: Any) -> list[dict[str, str]] | None:
        """The messages of a request; None if the template refuses it."""
        try:
            return self.writer.write(kind, request)
        except DialogueRefused:
            return None

    def _ask(
        self, messages: Sequence[list[dict[str, str]]], settings: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Reply]:
        shared = {"model": self.model, **settings}
        requests = []
        for chat, seed in zip(messages, seeds, strict=True):
            # A greedy reply does not depend on the seed, so equal greedy requests are one.
            seeded = {"seed": seed} if settings["temperature"] else {}
            requests.append(EndpointRequest(CHAT, {**shared, "messages": chat, **seeded}))
        return self.asks.ask(requests)


def _thinking(thinking: str) -> dict[str, Any]:
    """The field of a request that switches the thoughts of a reasoning model "on" or "off"; none for "auto"."""
    variables = thinking_variables(thinking)
    return {"chat_template_kwargs": variables} if variables else {}


def verdict_tokens(settings: FeedbackConfig) -> int:
    """The maximum number of tokens of an answer with a verdict or a rating, its reasoning included."""
    return _VERDICT_TOKENS + (settings.max_reasoning_tokens if settings.reasoning else 0)


def _seed(key: jax.Array, row: int, sample: int = 0) -> int:
    """A seed below 2**31 that depends only on the arguments."""
    words = np.asarray(jax.random.key_data(key), np.uint32).tobytes()
    digest = hashlib.sha256(words + row.to_bytes(8, "little") + sample.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:4], "little") >> 1
