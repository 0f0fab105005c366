"""The URLs that share the requests, and the health of each."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Sequence

from jaxalign.endpoint.failures import Fatal, Transient
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
