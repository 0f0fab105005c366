"""Coordination of the processes of a run: the first process, work that only it does, and failure notices.

Every process runs the same program in the same order. Side effects (files, a user's function) happen on the first process in
`once`, which returns the result on all. This module does not import JAX: without JAX, or without jax.distributed, a process is
a run of one.

Messages use the coordination service of jax.distributed and not the devices: a process that waits for slow work of the first
one is not inside a collective, whose backend may have a time limit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxalign import interrupts
from jaxalign.errors import UserError
from jaxalign.parallel.last_step import LastStep

T = TypeVar("T")

_SLICE_MS = 2_000  # Interval between checks for signals.
_EVER_MS = 7 * 24 * 3_600_000
_SWEEP = 64  # Results of `once` that are kept until all processes have read them.
_POLLS = 100  # Polls of the service for a failure notice per second, summed over all processes.
_GRACE_SECONDS = 10.0  # Time for the others to read a failure notice before the process with the service ends.
_FAST = 0.05  # Part of the usual interval between polls while the processes agree on their last step.
_KILLED = "it was killed, or its host was lost"
_numbers = itertools.count()
_before_end: list[Callable[[int, str], None]] = []
_inside = False  # Whether the action of `once` is running.
_NOTICES, _FAILED, _CONFIRMED = "jaxalign/notice/", "jaxalign/notice/failed", "jaxalign/confirmed/"


def _state() -> Any:
    """JAX's state of the processes; None for a single process. JAX has no public interface to their service."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state = distributed.global_state
    return None if state.client is None or state.num_processes == 1 else state


def count() -> int:
    """Returns the number of processes of the run."""
    state = _state()
    return 1 if state is None else state.num_processes


def index() -> int:
    """Returns the index of this process, from 0."""
    state = _state()
    return 0 if state is None else state.process_id


def is_first() -> bool:
    """Returns whether this process writes files, prints, and calls external functions."""
    return index() == 0


def once(action: Callable[[], T]) -> T:
    """Calls `action` on the first process and returns its result on all; the others wait.

    The result must be JSON. All processes must call this in the same order, from their main threads; a nested `once` calls its
    action directly.

    Raises: UserError: on all processes, if the action raises it. Any other error is raised only on the first process and ends
    the run.
    """
    global _inside
    state = _state()
    if state is None or _inside:
        return action()
    number = next(_numbers)
    key = f"jaxalign/once/{number}"
    if state.process_id == 0:
        _inside = True
        try:
            result = action()
            outcome = {"result": result}
        except UserError as error:
            outcome = {"error": str(error)}
        finally:
            _inside = False
        state.client.key_value_set(key, json.dumps(outcome))
    else:
        outcome = None
        while outcome is None:
            try:
                outcome = json.loads(state.client.blocking_key_value_get(key, _SLICE_MS))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
    if number % _SWEEP == _SWEEP - 1:
        state.client.wait_at_barrier("jaxalign", _EVER_MS)
        if state.process_id == 0:
            state.client.key_value_delete("jaxalign/once/")
    if "error" in outcome:
        raise UserError(outcome["error"])
    return result if state.process_id == 0 else outcome["result"]


def wait() -> None:
    """Waits until all processes have called this."""
    state = _state()
    if state is not None:
        state.client.wait_at_barrier("jaxalign", _EVER_MS)


@contextlib.contextmanager
def first_alone(manager: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Enters a context on the first process only; if that fails, all processes raise."""
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(manager())

        once(enter)
        yield


@contextlib.contextmanager
def before_end(action: Callable[[int, str], None]) -> Iterator[None]:
    """While the body runs, the watch calls `action(exit code, sentence)` before it ends this process because another one has
    ended. The action is skipped, or cut short, if the process that was killed is process 0."""
    _before_end.append(action)
    try:
        yield
    finally:
        _before_end.remove(action)


class Watch:
    """Ends this process when another one reports a failure or ends without a report, whatever this one is waiting for.

    A call to the service does not return while process 0 is stopped, and JAX aborts this process some seconds after process 0
    was killed. One thread therefore only watches the connections. Another one calls the service.

    Attributes:
      ending: set once the watch has begun to end this process.

    Args:
      connections: open connections by process (`roll_call.call`).
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        state = _state()
        self._woken, self._lock, self.ending = threading.Event(), threading.RLock(), threading.Event()
        self._over, self._code = False, None  # Whether `stop` was called; the exit code of this process, once it is known.
        self._lost: int | None = None
        self._last_step = LastStep(state.client, state.process_id, state.num_processes, wait)
        interrupts.agree_by(self._last_step)
        self._connections = connections
        threading.Thread(target=self._watch_connections, name="jaxalign-connections", daemon=True).start()
        self._thread = threading.Thread(target=self._look, name="jaxalign-watch", daemon=True)
        self._thread.start()

    def stop(self, code: int | None = None) -> None:
        """Ends the watch. From now on, the others do not take the end of this process for a failure.

        Args:
          code: the exit code if this process ends by a failure of its own. The process also exits with this code if process 0
            is killed before it has ended.
        """
        with self._lock:
            self._over = True
            self._code = code if self._code is None else self._code
        self._woken.set()
        self._thread.join(_GRACE_SECONDS)  # It may wait for the service, which does not answer while process 0 is stopped.
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # It has ended.
                connection.send(b".")

    def _watch_connections(self) -> None:
        """Finds processes that end before they call `stop`. Does not call the service. Ends this process at once if process 0
        was killed, because the service has ended with it."""
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        stopped = key.fileobj.recv(1)
                    except OSError:
                        stopped = b""
                    selector.unregister(key.fileobj)
                    if not stopped and key.data == 0:
                        with self._lock:
                            if self._code is None:
                                self._report({"process": 0, "code": 1, "why": _KILLED})
                            os._exit(self._code)
                    if not stopped:
                        self._lost = key.data
                        self._woken.set()

    def _report(self, failure: dict[str, Any]) -> str:
        """Prints why this process ends, and returns the sentence."""
        sentence = f"process {index()} ends because process {failure['process']} did: {failure['why']}"
        self._code = failure["code"]
        self.ending.set()
        print(sentence, file=sys.stderr, flush=True)
        return sentence

    def _look(self) -> None:
        state, failure = _state(), None
        while failure is None:
            self._woken.wait(poll_seconds(state.num_processes) * (_FAST if self._last_step.settling else 1.0))
            if self._over:
                return
            failure = self._failure(state)
        with self._lock:
            if self._over:  # This process has failed too, and reports its own failure.
                return
            sentence = self._report(failure)

        def finish() -> None:
            for action in list(_before_end):
                try:
                    action(self._code, sentence)
                except Exception as error:  # The other processes wait for the confirmation.
                    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            _confirm_failure(state)

        _in_time(finish)
        os._exit(self._code)

    def _failure(self, state: Any) -> dict[str, Any] | None:
        """The failure that another process has reported, or the one that its lost connection shows; None if all go on."""
        lost = self._lost  # First: a process that reports a failure does so before it ends.
        try:
            notices = dict(state.client.key_value_dir_get(_NOTICES))
            if _FAILED in notices:
                return json.loads(notices[_FAILED])
            self._last_step.settle(notices)
        except RuntimeError:  # The service has ended.
            pass
        if lost is None:
            return None
        failure = {"process": lost, "code": 1, "why": _KILLED}
        _set_failure(state, failure)
        state.client.key_value_set(f"{_CONFIRMED}{lost}", "", allow_overwrite=True)
        return failure


def poll_seconds(processes: int) -> float:
    """The interval at which each process looks for news of the others."""
    return max(1.0, processes / _POLLS)


def announce_failure(code: int, why: str) -> None:
    """Notifies all other processes that this one ends with the exit code `code`."""
    state = _state()
    if state is None:
        return

    def announce() -> None:
        _set_failure(state, {"process": state.process_id, "code": code, "why": why})
        _confirm_failure(state)

    _in_time(announce)


def _in_time(action: Callable[[], None]) -> None:
    """Calls `action` in a thread. Returns after some seconds even if the action has not: calls to the service do not return
    while process 0 is stopped."""
    thread = threading.Thread(target=action, name="jaxalign-failure", daemon=True)
    thread.start()
    thread.join(2 * _GRACE_SECONDS + poll_seconds(count()))


def _set_failure(state: Any, failure: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError):  # Another process was faster, or the service has ended: all processes know.
        state.client.key_value_set(_FAILED, json.dumps(failure))


def _confirm_failure(state: Any) -> None:
    """Confirms the failure notice. The first process, which has the service, waits until all others have confirmed."""
    until = time.monotonic() + _GRACE_SECONDS + poll_seconds(state.num_processes)
    with contextlib.suppress(RuntimeError):
        state.client.key_value_set(f"{_CONFIRMED}{state.process_id}", "", allow_overwrite=True)
        if state.process_id == 0:
            while len(state.client.key_value_dir_get(_CONFIRMED)) < state.num_processes and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1.0)  # The others are about to end.
