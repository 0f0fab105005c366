"""The exception for mistakes that the user can correct. Entry points print its message and exit with code 2."""

from __future__ import annotations

import sys


class UserError(Exception):
    """A mistake in the program's input. The message names the item, its value, the expected value and the remedy."""


def print_error(sentence: str, code: int) -> int:
    """Flushes stdout, prints `sentence` on stderr and returns `code`, the exit code of an entry point."""
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
    return code
