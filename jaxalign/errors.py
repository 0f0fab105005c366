"""The exception for mistakes that the user can correct, and the end of entry points, which print its message."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

_GRACE_SECONDS = 5.0


class UserError(Exception):
    """A mistake in the program's input. The message names the item, its value, the expected value and the remedy."""


def print_error(sentence: str, code: int) -> int:
    """Flushes stdout, prints `sentence` on stderr and returns `code`, the exit code of an entry point."""
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
    return code


def run_to_the_end(main: Callable[[], int]) -> None:
    """Calls an entry point and ends the process with its exit code, or 1 after the traceback of an unexpected error.

    Python waits at exit for all threads. After a failed checkpoint, threads of Orbax wait forever, and the process would keep
    its devices; so threads get `_GRACE_SECONDS` to end.
    """
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    until = time.monotonic() + _GRACE_SECONDS
    while code and any(x.is_alive() and not x.daemon for x in threading.enumerate() if x is not threading.current_thread()):
        if time.monotonic() > until:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        time.sleep(0.1)
    sys.exit(code)
