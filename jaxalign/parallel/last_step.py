"""The step after which all processes of a run end, once a signal has asked one of them to.

All processes run the same steps, but one may be ahead of another. A process that learns of the request holds a lock, which its
training loop needs at the end of a step, and publishes the number of its completed steps. The run ends after the step that
follows the highest of these numbers: no process has completed it. Only locks are taken at a step; messages are sent by the
thread of `hosts.Watch`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from jaxalign import interrupts

ASKED = "jaxalign/notice/end"
_PLACES = "jaxalign/end/"


class LastStep:
    """Agrees with the other processes on the last step (`interrupts.StopAgreement`).

    Args:
      client: the client of the coordination service.
      process: the index of this process.
      processes: the number of processes.
      wait: waits until all processes have called it.
    """

    def __init__(self, client: Any, process: int, processes: int, wait: Callable[[], None]):
        self._client, self._process, self._processes, self.wait = client, process, processes, wait
        self._lock = threading.Lock()
        self._loops, self._completed = 0, -1  # -1: no step is completed in this process.
        self._inside = False
        self._last: int | None = None
        self._settled = False
        self.settling = False
        self.refused = False

    def enter(self) -> None:
        """A training loop begins."""
        with self._lock:
            self._loops, self._completed, self._inside = self._loops + 1, -1, True

    def leave(self) -> bool:
        """A training loop has ended. Returns whether the run ends with it; a second call does nothing."""
        with self._lock:
            inside, self._inside = self._inside, False
            return inside and self._last is not None

    def reached(self, completed: int) -> bool:
        """Whether the run ends after this number of completed steps."""
        with self._lock:
            self._completed = completed
            return self._last is not None and completed >= self._last

    def ask(self, number: int) -> None:
        """Announces that the signal `number` has asked this process to end."""
        with contextlib.suppress(RuntimeError):  # Another process has done so.
            self._client.key_value_set(ASKED, str(number))

    def settle(self, notices: dict[str, str]) -> None:
        """Takes part in the agreement, if a notice asks for one. The thread that watches the other processes calls this with
        the current notices until the agreement is settled."""
        if self._settled or ASKED not in notices:
            return
        if not self.settling:
            self._lock.acquire()  # The loop of this process cannot complete another step until all have published theirs.
            self.settling = True
            place = {"loop": self._loops if self._inside else None, "completed": self._completed}
            self._client.key_value_set(f"{_PLACES}{self._process}", json.dumps(place))
        places = [json.loads(value) for _, value in self._client.key_value_dir_get(_PLACES)]
        if len(places) < self._processes:
            return
        if None in (loops := {place["loop"] for place in places}) or len(loops) > 1:
            self.refused = True
        else:
            self._last = max(place["completed"] for place in places) + 1
            interrupts.receive(int(notices[ASKED]))
        self._settled, self.settling = True, False
        self._lock.release()
