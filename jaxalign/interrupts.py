"""SIGINT and SIGTERM during a run: a training loop ends after its current step and a checkpoint, other work ends at once.

No exception is raised in a signal handler: Python discards one in a destructor or a callback of the garbage collector, and
extension modules can crash on one while they are imported. A thread receives the signals instead. It ends the process in
whatever state the main thread is; files are written such that a run resumes after any end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

SENTENCE = "interrupted; run the same command again to resume"
_GRACE_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 20.0}  # Kubernetes and Slurm kill a process 30 s after SIGTERM.
_before_end: list[Callable[[int, str], None]] = []
_received = 0
_waits = False  # Whether the main thread is in `at_steps`.
_LOOK_SECONDS = 0.2


class StopAgreement(Protocol):
    """How several processes agree on the step after which all of them end.

    Attributes:
      refused: whether they cannot agree, because a process is not in a training loop.
    """

    refused: bool

    def enter(self) -> None:
        """A training loop begins."""

    def leave(self) -> bool:
        """A training loop has ended. Returns whether the run ends with it; a second call does nothing."""

    def wait(self) -> None:
        """Waits until all processes have left the training loop with which the run ends."""

    def reached(self, completed: int) -> bool:
        """Whether the run ends after this number of completed steps."""

    def ask(self, number: int) -> None:
        """Announces that the signal `number` has asked this process to end."""


_agreement: StopAgreement | None = None


def install() -> None:
    """Handles SIGINT and SIGTERM from now on, except one that the process was started to ignore.

    Call it in the main thread of a program, before long imports.
    """
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for number in _GRACE_SECONDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # Python writes the number to the pipe.
    threading.Thread(target=_listen, args=(incoming,), name="jaxalign-signals", daemon=True).start()


def agree_by(agreement: StopAgreement) -> None:
    """Lets the training loops of several processes end after the same step."""
    global _agreement
    _agreement = agreement


def receive(number: int) -> None:
    """Records the signal `number`, which another process has received for all."""
    global _received
    _received = _received or number


def received() -> bool:
    """Returns whether a signal has asked this process to end."""
    return _received != 0


def ends_after(completed: int) -> bool:
    """Returns whether a training loop ends after this number of completed steps, because a signal has asked for it. Call it
    after every step, in several processes with the same numbers."""
    return _agreement.reached(completed) if _agreement is not None and _waits else received()


def exit_code() -> int:
    """Returns the exit code of an interrupted process: 128 and the number of the signal."""
    return 128 + (_received or signal.SIGINT)


@contextlib.contextmanager
def at_steps(allowed: bool = True) -> Iterator[None]:
    """Lets the body end by itself within some seconds after a signal: it must test `ends_after` often. A second signal ends the
    process at once. With allowed=False this does nothing.

    Raises:
        KeyboardInterrupt: at the end of the body, if there was a signal.
    """
    global _waits
    _waits = allowed
    agreement = _agreement if allowed else None
    if agreement is not None:
        agreement.enter()
    try:
        yield
        if allowed and (received() if agreement is None else agreement.leave()):
            if agreement is not None:
                agreement.wait()  # The first process that ends would end the others during their checkpoint.
            raise KeyboardInterrupt
    finally:
        if agreement is not None:
            agreement.leave()
        _waits = False


@contextlib.contextmanager
def before_end(action: Callable[[int, str], None]) -> Iterator[None]:
    """While the body runs, a signal that ends the process first calls `action(exit code, reason)`."""
    _before_end.append(action)
    try:
        yield
    finally:
        _before_end.remove(action)


def _listen(pipe: int) -> None:
    global _received
    number = 0
    while number not in _GRACE_SECONDS:
        number = os.read(pipe, 1)[0]
    _received = number
    if _waits:
        print("the run ends after this step; a second signal ends it at once", file=sys.stderr, flush=True)
        if _agreement is not None:
            _agreement.ask(number)
        _wait(pipe, time.monotonic() + _GRACE_SECONDS[number])
    print(SENTENCE, file=sys.stderr, flush=True)
    for action in _before_end:
        action(exit_code(), "interrupted")
    os._exit(exit_code())


def _wait(pipe: int, until: float) -> None:
    """Waits until the time `until`, for another signal, or until the processes cannot agree on a last step."""
    again = 0
    while again not in _GRACE_SECONDS and time.monotonic() < until and not (_agreement is not None and _agreement.refused):
        if select.select([pipe], [], [], min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))[0]:
            again = os.read(pipe, 1)[0]
