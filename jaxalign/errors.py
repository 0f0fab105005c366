"""The exception for mistakes that the user can correct, and the end of entry points, which print its message."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

_GRACE_SECONDS = 5.0
_LONGEST_LINE = 1500  # Characters of a line of a message.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ESTALE,
             errno.ENAMETOOLONG)
"""Errors of the file system that the user can correct. ENOENT is not one of them: it may also be a mistake in the program."""


class UserError(Exception):
    """A mistake in the program's input. The message names the item, its value, the expected value and the remedy.

    Lines that repeat a long value lose their middle, and characters that cannot be printed are escaped.
    """

    def __init__(self, message: str):
        super().__init__("\n".join(map(shown, message.split("\n"))))


def shown(text: str) -> str:
    """Returns a text as one line of a message: unprintable characters are escaped, a long text loses its middle."""
    if not text.isprintable():
        # Only the two ends can be shown, and an escape is at least as long as its character.
        ends = text if len(text) <= 2 * _LONGEST_LINE else text[:_LONGEST_LINE] + text[-_LONGEST_LINE:]
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in ends)
    if len(text) <= _LONGEST_LINE:
        return text
    begin, end = text[: _LONGEST_LINE * 2 // 3], text[-_LONGEST_LINE // 4 :]
    return f"{begin} [...] {end}"


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def run_error(error: BaseException) -> str | None:
    """Explains why a run failed, and how to correct it.

    Returns:
      The message of a UserError, or a message for an error of the file system that the user can correct; None for any other
      error.
    """
    if isinstance(error, UserError):
        return str(error)
    if is_full(error):
        return f"the disk is full ({error}); free some space and run the same command again to resume"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (f"{error.filename or 'a file of the run'} cannot be written, because a file would exceed the limit of this "
                "process or of the file system; raise the limit (`ulimit -f`), or choose a --workdir on another file system, "
                "and run the same command again to resume")
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        return (f"{error.filename or 'a file of the run'} cannot be used ({error.strerror}); correct it or its permissions, "
                "or choose another --workdir, and run the same command again to resume")
    return None


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
