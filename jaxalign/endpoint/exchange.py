"""One request until its reply: limits, choice of the URL, repetition, classification."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.endpoint.failures import (
    Failure,
    Fatal,
    Target,
    Transient,
    classify_status,
    server_message,
)
from jaxalign.endpoint.pool import Breaker, Member, Pacing, pick
from jaxalign.endpoint.records import MalformedReply
from jaxalign.endpoint.redaction import ApiKey, shown_url
from jaxalign.endpoint.spending import FAILURE, Spending
from jaxalign.endpoint.transport import HTTPResponse, Transport
from jaxalign.json_text import parse_json

_LONG_WAIT = 10.0
"""Seconds from which the client reports that a server asks to wait."""
_CHARACTERS_PER_TOKEN = 4


class Call(NamedTuple):
    """A request with the functions that read its response.

    Attributes:
      path: the path below the base URL.
      body: the JSON body; None for a GET request.
      parse: turns the JSON of a response into a value. Raises MalformedReply.
      finish: turns that value, the raw text of the response and its target into the result, or into a Fatal failure.
    """

    path: str
    body: Mapping[str, Any] | None
    parse: Callable[[Any], Any]
    finish: Callable[[Any, str, Target], Any]


@dataclasses.dataclass
class CallBatch:
    """The calls of one blocking call of the client.

    Attributes:
      is_stopped: whether a call failed, so that the others end after their present attempt.
      sending: the tasks with a request in flight.
    """

    is_stopped: bool = False
    sending: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)


class _Outcome(NamedTuple):
    """The result of an attempt, or its failure."""

    member: Member
    result: Any
    is_probe: bool


class RateLimits:
    """Delays requests so that config.endpoint.requests_per_minute and tokens_per_minute hold; 0: no limit. Used on one event
    loop.

    At most one second's worth of units passes at once: a burst of a minute's worth would double the rate of the first minute.
    """

    def __init__(self, settings: EndpointConfig):
        import aiolimiter

        self._limiters: dict[str, aiolimiter.AsyncLimiter] = {}
        for unit, per_minute in (("requests", settings.requests_per_minute), ("tokens", settings.tokens_per_minute)):
            if per_minute > 0:
                capacity = max(1.0, per_minute / 60)
                self._limiters[unit] = aiolimiter.AsyncLimiter(capacity, 60 * capacity / per_minute)

    async def acquire(self, body: Mapping[str, Any]) -> None:
        """Waits until a request with this body may be sent.

        The tokens of a request are estimated: its prompt at four characters per token, and the maximum number of generated
        tokens.
        """
        for unit, limiter in self._limiters.items():
            units = 1.0
            if unit == "tokens":
                prompt = body.get("messages") or body.get("prompt") or ""
                requested = body.get("max_completion_tokens") or body.get("max_tokens") or 0
                units = len(json.dumps(prompt, ensure_ascii=False)) // _CHARACTERS_PER_TOKEN + int(requested)
            while units > 0:  # A request may need more units than the limiter holds.
                part = min(units, limiter.max_rate)
                await limiter.acquire(part)
                units -= part


class Exchange:
    """Sends requests to the URLs of the settings. Created and used on one event loop."""

    def __init__(self, settings: EndpointConfig, key: ApiKey, spending: Spending, pacing: Pacing, say: Callable[[str], None]):
        self._settings, self._key, self._spending, self._pacing, self._say = settings, key, spending, pacing, say
        self._members = [Member(shown_url(url), Transport(url, settings, key), pacing, settings.concurrency)
                         for url in settings.url]
        self.breaker = Breaker(pacing, settings.max_down, say)
        self._limits = RateLimits(settings)
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def complete(self, call: Call, batch: CallBatch) -> Any:
        """The result of a call, after at most max_retries repetitions. Attempts during a pause do not count.

        Raises:
          Fatal: the request cannot succeed.
          UserError: the budget is reached, or the store cannot be written.
        """
        outcome = await self._attempt(call, batch, None)
        if isinstance(outcome.result, Transient):
            outcome = await self._repeat(call, batch, outcome)
        if isinstance(outcome.result, Failure):
            raise outcome.result
        return outcome.result

    async def _repeat(self, call: Call, batch: CallBatch, failed: _Outcome) -> _Outcome:
        """The outcome of a call whose first attempt failed. The first attempt is outside of the retry layer, which costs
        processor time for each request."""
        import stamina

        retries = _Retries(self._settings.max_retries, self._pacing, self._spending, self.breaker, batch)
        outcome: _Outcome | None = failed
        member = failed.member
        try:
            async for attempt in stamina.retry_context(on=retries, attempts=None, timeout=None):
                with attempt:
                    outcome = outcome or await self._attempt(call, batch, member)
                    if isinstance(outcome.result, Transient):
                        last, member, retries.is_probe = outcome.result, outcome.member, outcome.is_probe
                        outcome = None
                        raise last
        except Transient:
            sentence = (f"{last}, for the last time after {retries.failures} attempts; repeat the run, which continues from "
                        f"the stored answers, or raise config.endpoint.max_retries={self._settings.max_retries}")
            return _Outcome(member, Fatal(last.kind, sentence), False)
        return outcome

    async def close(self) -> None:
        for member in self._members:
            await member.transport.session.close()

    async def _attempt(self, call: Call, batch: CallBatch, avoid: Member | None) -> _Outcome:
        async with self._slots:
            if call.body is not None:
                await self._limits.acquire(call.body)
            is_probe = await self.breaker.admit()
            try:
                member = await pick(self._members, self._settings.max_down, avoid)
                self._spending.check_budget()
                result = await self._send(member, call, batch)
                self._note(member, result, is_probe)
            finally:
                if is_probe:
                    self.breaker.finished_probe()
        return _Outcome(member, result, is_probe)

    async def _send(self, member: Member, call: Call, batch: CallBatch) -> Any:
        model = str((call.body or {}).get("model", ""))
        target = Target(member.url, model, self._key.variable, self._key.is_set)
        task = asyncio.current_task()
        member.in_flight += 1
        batch.sending.add(task)
        self._spending.count("sent")
        try:
            response = await member.transport.exchange(call.path, call.body, target)
        finally:
            member.in_flight -= 1
            batch.sending.discard(task)
        return response if isinstance(response, Failure) else _interpret(response, call, target)

    def _note(self, member: Member, result: Any, is_probe: bool) -> None:
        if isinstance(result, Failure):
            self._spending.count(FAILURE + result.kind)
        if not isinstance(result, Transient):
            member.succeeded()
            if self.breaker.succeeded():
                for each in self._members:  # The outcomes of an outage do not count after it.
                    each.recent.clear()
            return
        if (result.wait or 0.0) >= _LONG_WAIT and member.rest_until <= time.monotonic():
            self._say(f"[endpoint] {member.url} asks to wait {result.wait:.0f} s")
        member.failed(result, has_others=len(self._members) > 1)
        self.breaker.failed(result, is_probe)
        if all(each.is_failing() for each in self._members):
            self.breaker.open()


@dataclasses.dataclass
class _Retries:
    """Decides after each failure of a request whether, and after how many seconds, it is sent again.

    A failure counts against the request if the server works: other requests succeeded since its previous failure, or the
    failure is of a kind that this request may cause. More than max_retries of these end the request. After max_retries failures
    in a row that do not count, all requests pause.
    """

    most: int
    pacing: Pacing
    spending: Spending
    breaker: Breaker
    batch: CallBatch
    failures: int = 0
    is_probe: bool = False
    _successes: int = 0
    _counted: int = 0
    _in_outage: int = 0

    def __call__(self, error: Exception) -> bool | float:
        if not isinstance(error, Transient) or self.batch.is_stopped:
            return False
        if self.is_probe:
            wait = 0.0  # The breaker waits between probes.
        else:
            self.failures += 1
            bound = self.pacing.retry * 2 ** min(self.failures - 1, 60)
            wait = random.uniform(0, min(self.pacing.longest_retry, bound))  # "Full jitter".
            if not error.is_down or self.breaker.successes > self._successes:
                self._counted, self._in_outage = self._counted + 1, 0
                if self._counted > self.most:
                    return False
            else:
                self._in_outage += 1
                if self._in_outage >= self.most:
                    self.breaker.open()
                    self._in_outage, wait = 0, 0.0
            self._successes = self.breaker.successes
        self.spending.count("retries")
        return wait


def _interpret(response: HTTPResponse, call: Call, target: Target) -> Any:
    text = response.text
    if not 200 <= response.status < 300:
        refusal = classify_status(response.status, response.headers, text or "", target)
        if isinstance(refusal, Failure):
            return refusal
        text = json.dumps(refusal)
    try:
        if text is None:
            raise MalformedReply("the body is not UTF-8")
        value = call.parse(parse_json(text))
    except MalformedReply as error:
        reason = str(error)
    except json.JSONDecodeError:
        reason = "the body is not JSON"
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"a field has another form than expected, {type(error).__name__}"
    else:
        return call.finish(value, text, target)
    message, _ = server_message(text or "")
    detail = f'{reason}: "{message}"' if message else reason
    return Transient("malformed", f"{target.url} sent a malformed reply ({detail})")
