"""The API key: read from the environment, sent, and removed from all text that is shown or stored."""

from __future__ import annotations

import json
import os
import urllib.parse

from jaxalign.errors import UserError

_SHORTEST = 8
"""Shorter keys are dummies such as "EMPTY". Removing them would damage ordinary text."""


class ApiKey:
    """The key in an environment variable. Its text form names only the variable.

    Attributes:
      variable: the name of the environment variable.
      value: the key to send; "" if the variable is not set.

    Raises:
      UserError: the key has characters that no HTTP header may have.
    """

    def __init__(self, variable: str):
        self.variable = variable
        key = os.environ.get(variable, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise UserError(f"the environment variable {variable} has a character that an API key cannot have; set it to the "
                            "key, without line breaks or accented letters")
        self.is_set = bool(key)
        self.value = key
        forms = {key, json.dumps(key)[1:-1], key.replace("/", "\\/"), urllib.parse.quote(key, safe="")}
        self._forms = sorted(forms, key=len, reverse=True) if len(key) >= _SHORTEST else []

    def redact(self, text: str) -> str:
        """`text` with "[key]" in place of the key."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text

    def __repr__(self) -> str:
        return f"ApiKey({self.variable!r})"


def shown_url(url: str) -> str:
    """A URL for messages: without user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
