"""What several processes of one run need of each other: who is first, what it alone does, and word of a failure.

Every process runs the same program in the same order. What touches the world (files, a user's function) the first one does in
`once`, and all learn the result there. JAX is not loaded here: where it is not, or was not told of others, a process is alone.

Words go through the service that JAX's processes keep with each other, not through the devices: a process that waits for the
first one's slow work stands in no collective, whose backend may have a limit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxalign.errors import UserError

T = TypeVar("T")

_SLICE_MS = 2_000  # Between two looks at what the system has signalled.
_EVER_MS = 7 * 24 * 3_600_000
_SWEEP = 64  # Results of `once` that are kept before all are known to be read.
_POLLS = 100  # A second that all processes together ask the first one's service for word of a failure.
_GRACE_SECONDS = 10.0  # For the others to hear of a failure before the process that has their service ends.
_numbers = itertools.count()
_inside = False  # Whether the action of `once` is being done.
_FAILED, _HEARD = "jaxalign/failed", "jaxalign/heard/"


def _state() -> Any:
    """JAX's record of the processes; None where this one is alone. JAX has no public door to their service."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state = distributed.global_state
    return None if state.client is None or state.num_processes == 1 else state


def count() -> int:
    """How many processes the run has."""
    state = _state()
    return 1 if state is None else state.num_processes


def index() -> int:
    """The number of this process, from 0."""
    state = _state()
    return 0 if state is None else state.process_id


def is_first() -> bool:
    """Whether this is the process that writes, prints and calls what is not the run's own."""
    return index() == 0


def once(action: Callable[[], T]) -> T:
    """What `action` gives on the first process, which alone calls it; all others wait for it.

    The result must be JSON. All processes must call this in the same order, from their main threads; what the action itself
    does `once` is simply done.

    Raises:
        UserError: the action has raised it, on all processes. Any other error is raised on the first alone, and ends the run.
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
            told = {"result": result}
        except UserError as error:
            told = {"error": str(error)}
        finally:
            _inside = False
        state.client.key_value_set(key, json.dumps(told))
    else:
        told = json.loads(_get(state.client, key))
    if number % _SWEEP == _SWEEP - 1:
        state.client.wait_at_barrier("jaxalign", _EVER_MS)
        if state.process_id == 0:
            state.client.key_value_delete("jaxalign/once/")
    if "error" in told:
        raise UserError(told["error"])
    return result if state.process_id == 0 else told["result"]


def wait() -> None:
    """Returns when all processes have come here."""
    state = _state()
    if state is not None:
        state.client.wait_at_barrier("jaxalign", _EVER_MS)


def _get(client: Any, key: str) -> str:
    while True:
        try:
            return client.blocking_key_value_get(key, _SLICE_MS)
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


@contextlib.contextmanager
def first_alone(manager: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """A context that the first process alone is in; where it cannot be entered, all are told."""
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(manager())

        once(enter)
        yield


class Watch:
    """Ends this process when another says that it failed, whatever this one waits for."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="jaxalign-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        state = _state()
        while not self._over.wait(_poll_seconds(state)):
            failure = _failure(state)
            if failure is None:
                continue
            if self._over.is_set():  # This one has failed too, and tells so itself.
                return
            print(f"process {state.process_id} ends, since process {failure['process']} has: {failure['why']}",
                  file=sys.stderr, flush=True)
            _until_heard(state)
            os._exit(failure["code"])


def _poll_seconds(state: Any) -> float:
    return max(1.0, state.num_processes / _POLLS)


def _failure(state: Any) -> dict | None:
    try:
        return json.loads(state.client.key_value_try_get(_FAILED))
    except RuntimeError:  # There is none; or no service any more, which JAX itself ends this process for.
        return None


def tell_failure(code: int, why: str) -> None:
    """Tells all other processes that this one ends with the exit code `code`."""
    state = _state()
    if state is None:
        return
    with contextlib.suppress(RuntimeError):  # Another was faster, or the service has gone: then all know.
        state.client.key_value_set(_FAILED, json.dumps({"process": state.process_id, "code": code, "why": why}))
    _until_heard(state)


def _until_heard(state: Any) -> None:
    """Says that this process has heard of the failure. The first one, which has the service, returns when all others have."""
    until = time.monotonic() + _GRACE_SECONDS + _poll_seconds(state)
    with contextlib.suppress(RuntimeError):
        state.client.key_value_set(f"{_HEARD}{state.process_id}", "", allow_overwrite=True)
        if state.process_id == 0:
            while len(state.client.key_value_dir_get(_HEARD)) < state.num_processes and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1.0)  # They are about to end.
