"""The one exception that means: the user can mend this. Entry points print it as a sentence and exit with code 2."""

from __future__ import annotations

import sys


class UserError(Exception):
    """A mistake in what the program was given. The message names the thing, the value, what was expected and the remedy."""


def tell(sentence: str, code: int) -> int:
    """Prints a sentence for the user on stderr, after all that went to stdout, and returns `code`: an entry point's end."""
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
    return code
