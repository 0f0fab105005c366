"""Work beside training, in a thread of its own, that can neither stop nor noticeably slow the training."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

MOST_SHARE = 0.01
"""The share of the wall-clock time that the work may take. After a call that took t seconds, no other begins for
t / MOST_SHARE seconds, however short the interval is."""

_FIRST_SECONDS = 0.3  # The assumed duration of the first call.
_JOIN_SECONDS = 5.0  # The longest time that the end of the body waits for a call that has begun.


class Repeating:
    """Calls a function every few seconds while the body of the `with` statement runs.

    A function that raises is called no more, after one warning.

    Args:
      name: the name of the thread and the subject of the warning, such as "the live report".
      seconds: the interval.
      action: the function.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], object]):
        self._name, self._seconds, self._action = name, seconds, action
        self._changed, self._stopped, self._soon = threading.Condition(), False, False
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._repeat,), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread; waits at most `_JOIN_SECONDS` for a call that has begun."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(_JOIN_SECONDS)

    def soon(self) -> None:
        """Makes the next call as early as `MOST_SHARE` allows."""
        with self._changed:
            self._soon = True
            self._changed.notify()

    @property
    def ended(self) -> bool:
        """Whether no call is running and none will follow."""
        return not self._thread.is_alive()

    def _repeat(self) -> None:
        spent = _FIRST_SECONDS
        while self._wait(time.monotonic(), spent / MOST_SHARE):
            began = time.monotonic()
            try:
                self._action()
            except Exception as error:
                logging.getLogger("jaxalign").warning(
                    f"{self._name} stops ({type(error).__name__}: {error}); the run goes on without it")
                return
            spent = time.monotonic() - began

    def _wait(self, since: float, least: float) -> bool:
        """Waits for the interval, or for `least` seconds after a call of `soon`. Returns False at the end of the body."""
        with self._changed:
            while not self._stopped:
                pause = since + (least if self._soon else max(self._seconds, least)) - time.monotonic()
                if pause <= 0:
                    break
                self._changed.wait(pause)
            self._soon = False
            return not self._stopped
