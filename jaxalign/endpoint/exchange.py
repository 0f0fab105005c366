"""One request until its reply: limits, choice of the URL, repetition, classification."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxalign.config.sections.endpoint import Endpoint
from jaxalign.endpoint.breaker import Breaker
from jaxalign.endpoint.failures import (
    Failure,
    Fatal,
    Target,
    Transient,
    classify_status,
    malformed_failure,
)
from jaxalign.endpoint.limits import RateLimits
from jaxalign.endpoint.pool import Member, Pacing, Pool
from jaxalign.endpoint.records import MalformedReply
from jaxalign.endpoint.redaction import ApiKey, shown_url
from jaxalign.endpoint.spending import Spending
from jaxalign.endpoint.transport import Response, Transport

_LONG_WAIT = 10.0
"""Seconds from which the client reports that a server asks to wait."""


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


class Batch:
    """The calls of one blocking call of the client.

    Attributes:
      is_stopped: whether a call failed, so that the others end after their present attempt.
      sending: the tasks with a request in flight.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self.sending: set[asyncio.Task[Any]] = set()


class _Outcome(NamedTuple):
    """The result of an attempt, or its failure."""

    member: Member[Transport]
    result: Any
    is_probe: bool


class Exchange:
    """Sends requests to the URLs of the settings. Created and used on one event loop."""

    def __init__(self, settings: Endpoint, key: ApiKey, spending: Spending, pacing: Pacing, say: Callable[[str], None]):
        self._settings, self._key, self._spending, self._pacing, self._say = settings, key, spending, pacing, say
        members = [Member(shown_url(url), Transport(url, settings, key), pacing, settings.concurrency) for url in settings.url]
        self._pool: Pool[Transport] = Pool(members, settings.max_down)
        self.breaker = Breaker(pacing, settings.max_down, say)
        self._limits = RateLimits(settings)
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def complete(self, call: Call, batch: Batch) -> Any:
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

    async def _repeat(self, call: Call, batch: Batch, failed: _Outcome) -> _Outcome:
        """The outcome of a call whose first attempt failed. The first attempt is outside of the retry layer, which costs
        processor time for each request."""
        import stamina

        retries = _Retries(self._settings, self._pacing, self._spending, self.breaker, batch)
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
        for member in self._pool.members:
            await member.sender.close()

    async def _attempt(self, call: Call, batch: Batch, avoid: Member[Transport] | None) -> _Outcome:
        async with self._slots:
            if call.body is not None:
                await self._limits.acquire(call.body)
            is_probe = await self.breaker.admit()
            try:
                member = await self._pool.pick(avoid)
                self._spending.check_budget()
                result = await self._send(member, call, batch)
                self._note(member, result, is_probe)
            finally:
                if is_probe:
                    self.breaker.finished_probe()
        return _Outcome(member, result, is_probe)

    async def _send(self, member: Member[Transport], call: Call, batch: Batch) -> Any:
        model = str((call.body or {}).get("model", ""))
        target = Target(member.url, model, self._key.variable, self._key.is_set)
        task = asyncio.current_task()
        member.in_flight += 1
        batch.sending.add(task)
        self._spending.count("sent")
        try:
            response = await member.sender.exchange(call.path, call.body, target)
        finally:
            member.in_flight -= 1
            batch.sending.discard(task)
        return response if isinstance(response, Failure) else _interpret(response, call, target)

    def _note(self, member: Member[Transport], result: Any, is_probe: bool) -> None:
        if isinstance(result, Failure):
            self._spending.count_failure(result.kind)
        if not isinstance(result, Transient):
            member.succeeded()
            if self.breaker.succeeded():
                self._pool.forget()
            return
        if (result.wait or 0.0) >= _LONG_WAIT and not member.is_resting():
            self._say(f"[endpoint] {member.url} asks to wait {result.wait:.0f} s")
        self._pool.failed(member, result)
        self.breaker.failed(result, is_probe)
        if self._pool.is_failing():
            self.breaker.open()


class _Retries:
    """Decides after each failure of a request whether, and after how many seconds, it is sent again.

    A failure counts against the request if the server works: other requests succeeded since its previous failure, or the
    failure is of a kind that this request may cause. More than max_retries of these end the request. After max_retries failures
    in a row that do not count, all requests pause.
    """

    def __init__(self, settings: Endpoint, pacing: Pacing, spending: Spending, breaker: Breaker, batch: Batch):
        self._most, self._pacing, self._spending = settings.max_retries, pacing, spending
        self._breaker, self._batch = breaker, batch
        self._successes = 0
        self._counted = self._in_outage = 0
        self.failures = 0
        self.is_probe = False

    def __call__(self, error: Exception) -> bool | float:
        if not isinstance(error, Transient) or self._batch.is_stopped:
            return False
        if self.is_probe:
            wait = 0.0  # The breaker waits between probes.
        else:
            self.failures += 1
            wait = self._pacing.jitter(self.failures)
            if not error.is_down or self._breaker.successes > self._successes:
                self._counted, self._in_outage = self._counted + 1, 0
                if self._counted > self._most:
                    return False
            else:
                self._in_outage += 1
                if self._in_outage >= self._most:
                    self._breaker.open()
                    self._in_outage, wait = 0, 0.0
            self._successes = self._breaker.successes
        self._spending.count("retries")
        return wait


def _interpret(response: Response, call: Call, target: Target) -> Any:
    text = response.text
    if not 200 <= response.status < 300:
        found = classify_status(response.status, response.headers, text or "", target)
        if isinstance(found, Failure):
            return found
        text = json.dumps(found)
    if text is None:
        return malformed_failure("the body is not UTF-8", "", target)
    try:
        raw = json.loads(text)
    except ValueError:
        return malformed_failure("the body is not JSON", text, target)
    try:
        value = call.parse(raw)
    except MalformedReply as error:
        return malformed_failure(str(error), text, target)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return malformed_failure(f"a field has another form than expected, {type(error).__name__}", text, target)
    return call.finish(value, text, target)
