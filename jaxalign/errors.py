"""The one exception that means: the user can mend this. Entry points print it as a sentence and exit with code 2."""

from __future__ import annotations

import sys


class UserError(Exception):
    """A mistake in what the program was given. The message names the thing, the value, what was expected and the remedy."""


def print_error(sentence: str, code: int) -> int:
    """Flush stdout, print `sentence` on stderr and return `code`, the exit code of an entry point."""
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
    return code
