"""Output to a terminal or a pipe that may be closed while a run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Output:
    """A text stream whose failures end its output, not the program."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        """Sends all further output, also that of libraries in C++, to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        if self._name == "stdout":
            print(f"standard output cannot be written ({error.strerror or error}); the run goes on without it", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_may_fail() -> Iterator[None]:
    """Lets the program go on, after one sentence on stderr, if the reader of its output ends, as `| head` does."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout, "stdout"), _Output(sys.stderr, "stderr")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
