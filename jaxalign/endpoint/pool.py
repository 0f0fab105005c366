"""The URLs that share the requests, and the health of each."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from jaxalign.endpoint.failures import Fatal, Transient

_LEAST = 16
"""Recent outcomes below which a URL is not judged by them."""
_CONSECUTIVE = 3
"""Consecutive failures after which a URL is set aside, if there are others."""

Sender = TypeVar("Sender")


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

    def jitter(self, failures: int) -> float:
        """A random time between 0 and the bound after `failures` >= 1 failures ("full jitter")."""
        return random.uniform(0, min(self.longest_retry, self.retry * 2 ** min(failures - 1, 60)))


class Member(Generic[Sender]):
    """One URL, the object that sends to it, and its health.

    Args:
      concurrency: the maximum number of requests in flight. Failures are often faster than replies, so a URL is judged only by
        more outcomes than that.
    """

    def __init__(self, url: str, sender: Sender, pacing: Pacing, concurrency: int):
        self.url, self.sender, self._pacing = url, sender, pacing
        self.in_flight = 0
        self.rest_until = 0.0  # requested by the server
        self.aside_until = 0.0  # decided by the pool
        self._aside = pacing.aside
        self._consecutive = 0
        self._recent: collections.deque[bool] = collections.deque(maxlen=2 * max(_LEAST, concurrency))

    def is_failing(self) -> bool:
        """Whether most recent requests failed, or the URL is set aside."""
        mostly = 2 * len(self._recent) >= (self._recent.maxlen or 0) and 2 * self._recent.count(False) > len(self._recent)
        return mostly or self.aside_until > time.monotonic()

    def is_resting(self) -> bool:
        """Whether the server asked to wait."""
        return self.rest_until > time.monotonic()

    def forget(self) -> None:
        self._recent.clear()

    def succeeded(self) -> None:
        self._recent.append(True)
        self._consecutive, self.aside_until, self._aside = 0, 0.0, self._pacing.aside

    def failed(self, failure: Transient, has_others: bool) -> None:
        now = time.monotonic()
        self._recent.append(False)
        self._consecutive += 1
        if failure.wait is not None:
            self.rest_until = max(self.rest_until, now + failure.wait)
        # Requests that were in flight when the URL was set aside do not extend the time.
        if has_others and self._consecutive >= _CONSECUTIVE and self.aside_until <= now:
            self.aside_until = now + self._aside
            self._aside = min(2 * self._aside, self._pacing.longest_aside)


class Pool(Generic[Sender]):
    """Chooses the URL of each request.

    Args:
      longest_rest: seconds that the pool waits at the request of all servers; a longer time is a failure.
    """

    def __init__(self, members: Sequence[Member[Sender]], longest_rest: float):
        self.members, self._longest_rest = tuple(members), longest_rest

    async def pick(self, avoid: Member[Sender] | None = None) -> Member[Sender]:
        """The URL with the fewest requests in flight. Waits while every server asks to wait (Retry-After).

        Args:
          avoid: the URL that has just failed; it is used only if no other is available.

        Raises:
          Fatal: every server asks to wait longer than `longest_rest`.
        """
        while True:
            now = time.monotonic()
            awake = [member for member in self.members if member.rest_until <= now]
            if awake:
                usable = [member for member in awake if member.aside_until <= now]
                if not usable:
                    return min(awake, key=lambda member: member.aside_until)
                return min(usable, key=lambda member: (member is avoid, member.in_flight))
            first = min(self.members, key=lambda member: member.rest_until)
            if first.rest_until - now > self._longest_rest:
                raise Fatal("rate", f"{first.url} asks to wait {first.rest_until - now:.0f} seconds, longer than "
                            f"config.endpoint.max_down={self._longest_rest:g}; raise config.endpoint.max_down, lower "
                            "config.endpoint.concurrency, or repeat the run later, which continues from the stored answers")
            await asyncio.sleep(first.rest_until - now)

    def failed(self, member: Member[Sender], failure: Transient) -> None:
        member.failed(failure, len(self.members) > 1)

    def is_failing(self) -> bool:
        """Whether every URL fails."""
        return all(member.is_failing() for member in self.members)

    def forget(self) -> None:
        """Drops the recent outcomes, so that those of an outage do not count after it."""
        for member in self.members:
            member.forget()
