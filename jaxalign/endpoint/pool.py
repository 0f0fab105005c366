"""The URLs that share the requests, the health of each, and the pause of the client while they fail."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxalign.endpoint.failures import Failure, Fatal, Transient
from jaxalign.endpoint.transport import Transport

_LEAST = 16
"""Recent outcomes below which a URL is not judged by them."""
_CONSECUTIVE = 3
"""Consecutive failures after which a URL is set aside, if there are others."""


@dataclasses.dataclass(frozen=True)
class Pacing:
    """Waiting times in seconds; each grows by a factor of 2 from its first to its longest value.

    Attributes:
      retry, longest_retry: the upper bound of the random time before a request is repeated.
      aside, longest_aside: the time for which a failing URL gets no requests.
      probe, longest_probe: the time between the probes of a paused client.
    """

    retry: float = 0.5
    longest_retry: float = 60.0
    aside: float = 1.0
    longest_aside: float = 300.0
    probe: float = 1.0
    longest_probe: float = 60.0


class Member:
    """One URL, the connections to it, and its health.

    Args:
      concurrency: the maximum number of requests in flight. Failures are often faster than replies, so a URL is judged only by
        more outcomes than that.

    Attributes:
      rest_until: the time until which the server asked to wait.
      aside_until: the time until which the URL is set aside, because it fails.
      recent: whether each recent request succeeded.
    """

    def __init__(self, url: str, transport: Transport, pacing: Pacing, concurrency: int):
        self.url, self.transport, self._pacing = url, transport, pacing
        self.in_flight = 0
        self.rest_until = 0.0
        self.aside_until = 0.0
        self._aside = pacing.aside
        self._consecutive = 0
        self.recent: collections.deque[bool] = collections.deque(maxlen=2 * max(_LEAST, concurrency))

    def is_failing(self) -> bool:
        """Whether most recent requests failed, or the URL is set aside."""
        mostly = 2 * len(self.recent) >= (self.recent.maxlen or 0) and 2 * self.recent.count(False) > len(self.recent)
        return mostly or self.aside_until > time.monotonic()

    def succeeded(self) -> None:
        self.recent.append(True)
        self._consecutive, self.aside_until, self._aside = 0, 0.0, self._pacing.aside

    def failed(self, failure: Transient, has_others: bool) -> None:
        now = time.monotonic()
        self.recent.append(False)
        self._consecutive += 1
        if failure.wait is not None:
            self.rest_until = max(self.rest_until, now + failure.wait)
        # Requests that were in flight when the URL was set aside do not extend the time.
        if has_others and self._consecutive >= _CONSECUTIVE and self.aside_until <= now:
            self.aside_until = now + self._aside
            self._aside = min(2 * self._aside, self._pacing.longest_aside)


async def pick(members: Sequence[Member], longest_rest: float, avoid: Member | None = None) -> Member:
    """The URL with the fewest requests in flight. Waits while every server asks to wait (Retry-After).

    Args:
      members: the URLs.
      longest_rest: seconds to wait at the request of all servers; a longer time is a failure.
      avoid: the URL that has just failed; it is used only if no other is available.

    Raises:
      Fatal: every server asks to wait longer than `longest_rest`.
    """
    while True:
        now = time.monotonic()
        awake = [member for member in members if member.rest_until <= now]
        if awake:
            usable = [member for member in awake if member.aside_until <= now]
            if not usable:
                return min(awake, key=lambda member: member.aside_until)
            return min(usable, key=lambda member: (member is avoid, member.in_flight))
        first = min(members, key=lambda member: member.rest_until)
        if first.rest_until - now > longest_rest:
            raise Fatal("rate", f"{first.url} asks to wait {first.rest_until - now:.0f} seconds, longer than "
                        f"config.endpoint.max_down={longest_rest:g}; raise config.endpoint.max_down, lower "
                        "config.endpoint.concurrency, or repeat the run later, which continues from the stored answers")
        await asyncio.sleep(first.rest_until - now)


class Breaker:
    """Stops sending while most requests fail, and probes with one request at growing intervals.

    All methods are called on the client's event loop.

    Args:
      max_down: seconds without any success after which a paused client gives up.
      say: prints a line.

    Attributes:
      is_open: whether the client is paused.
      successes: the number of answers so far.
    """

    def __init__(self, pacing: Pacing, max_down: float, say: Callable[[str], None]):
        self._pacing, self._max_down, self._say = pacing, max_down, say
        self.is_open = False
        self.successes = 0
        self._is_probing = False
        self._interval = pacing.probe
        self._next_probe = 0.0
        self._failing_since: float | None = None
        self._message = ""
        self._changed = asyncio.Event()

    async def admit(self) -> bool:
        """Waits until the caller may send. Returns whether its request is a probe.

        The caller of a probe must then call `finished_probe`, whatever the result is.

        Raises:
          Fatal: no request succeeded for `max_down` seconds.
        """
        while self.is_open:
            if self._is_probing:
                await self._changed.wait()
                continue
            self._is_probing = True
            try:
                await self._sleep_until_probe()
            except BaseException:
                self.finished_probe()
                raise
            if self.is_open:
                return True
            self.finished_probe()
        return False

    def finished_probe(self) -> None:
        self._is_probing = False
        self._wake()

    def succeeded(self) -> bool:
        """Notes an answer of a server. Returns whether it ended a pause."""
        self.successes += 1
        was_open, since, now = self.is_open, self._failing_since, time.monotonic()
        self.is_open, self._failing_since = False, None
        if was_open:
            self._say(f"[endpoint] resumed after {now - (since or now):.1f} s without a reply")
            self._wake()
        return was_open

    def failed(self, failure: Failure, is_probe: bool) -> None:
        """Notes a failure that may pass."""
        self._message = str(failure)
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        if is_probe:
            self._interval = min(2 * self._interval, self._pacing.longest_probe)
            self._next_probe = time.monotonic() + self._interval

    def open(self) -> None:
        """Starts a pause, unless it has started."""
        if self.is_open:
            return
        self.is_open, self._interval = True, self._pacing.probe
        self._next_probe = time.monotonic() + self._interval
        self._say(f"[endpoint] paused: {self._message}; trying again for at most {self._max_down:g} s")

    def restart(self) -> None:
        """Resets the start of an outage when a call of the client begins. The time between two calls is not part of an outage,
        and a caller may repeat its requests after `max_down`."""
        now = time.monotonic()
        if not self.is_open:
            self._failing_since = None
        elif now >= (self._failing_since or now) + self._max_down:
            self._failing_since = self._next_probe = now

    async def _sleep_until_probe(self) -> None:
        deadline = (self._failing_since or time.monotonic()) + self._max_down
        # A late reply to an earlier request may end the pause before the next probe.
        while self.is_open and (now := time.monotonic()) < self._next_probe:
            if now >= deadline:
                break
            try:
                await asyncio.wait_for(self._changed.wait(), min(self._next_probe, deadline) - now)
            except TimeoutError:
                pass
        if self.is_open and time.monotonic() >= deadline:
            raise Fatal("down", f"no server answered for config.endpoint.max_down={self._max_down:g} seconds "
                        f"({self._message}); start the server and repeat the run, which continues from the stored answers")

    def _wake(self) -> None:
        # Waiting tasks resume at this set and test the state again; later tasks wait for the next one.
        self._changed.set()
        self._changed = asyncio.Event()
