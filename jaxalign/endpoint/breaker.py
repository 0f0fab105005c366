"""The pause of the client while its servers fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from jaxalign.endpoint.failures import Failure, Fatal
from jaxalign.endpoint.pool import Pacing


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
