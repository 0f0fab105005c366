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

SENTENCE = "interrupted; run the same command again to resume"
_GRACE_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 20.0}  # Kubernetes and Slurm kill a process 30 s after SIGTERM.
_before_end: list[Callable[[int, str], None]] = []
_received = 0
_waits = False  # Whether the main thread is in `at_steps`.


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


def received() -> bool:
    """Returns whether a signal has asked this process to end."""
    return _received != 0


def exit_code() -> int:
    """Returns the exit code of an interrupted process: 128 and the number of the signal."""
    return 128 + (_received or signal.SIGINT)


@contextlib.contextmanager
def at_steps(allowed: bool = True) -> Iterator[None]:
    """Lets the body end by itself within some seconds after a signal: it must test `received` often. A second signal ends the
    process at once. With allowed=False this does nothing.

    Raises:
        KeyboardInterrupt: at the end of the body, if there was a signal.
    """
    global _waits
    _waits = allowed
    try:
        yield
        if allowed and received():
            raise KeyboardInterrupt
    finally:
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
        until = time.monotonic() + _GRACE_SECONDS[number]
        again = 0
        while again not in _GRACE_SECONDS and select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            again = os.read(pipe, 1)[0]
    print(SENTENCE, file=sys.stderr, flush=True)
    for action in _before_end:
        action(exit_code(), "interrupted")
    os._exit(exit_code())
