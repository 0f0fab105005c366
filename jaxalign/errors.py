"""The one exception that means: the user can mend this. Entry points print it as a sentence and exit with code 2."""


class UserError(Exception):
    """A mistake in what the program was given. The message names the thing, the value, what was expected and the remedy."""
