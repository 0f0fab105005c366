"""The API key: read from the environment, sent, and removed from all text that is shown or stored. Other secrets of the
environment are removed from the messages of users' code."""

from __future__ import annotations

import json
import os
import re
import urllib.parse

from jaxalign.errors import UserError

_SHORTEST = 8
"""Shorter keys are dummies such as "EMPTY". Removing them would damage ordinary text."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|_PAT$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


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
        self._forms = _forms(key)

    def redact(self, text: str) -> str:
        """`text` with "[key]" in place of the key."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text

    def __repr__(self) -> str:
        return f"ApiKey({self.variable!r})"


def _forms(secret: str) -> list[str]:
    """The spellings of a secret in text, longest first; none for a dummy."""
    forms = {secret, json.dumps(secret)[1:-1], secret.replace("/", "\\/"), urllib.parse.quote(secret, safe="")}
    return sorted(forms, key=len, reverse=True) if len(secret) >= _SHORTEST else []


def redact_secrets(text: str) -> str:
    """`text` without passwords of URLs, and with "[NAME]" in place of the value of an environment variable NAME that looks like
    a secret, such as HF_TOKEN or DB_PASSWORD."""
    secrets = {name: value.strip() for name, value in os.environ.items() if _SECRET.search(name)}
    for name, value in sorted(secrets.items(), key=lambda item: len(item[1]), reverse=True):
        for form in _forms(value):
            text = text.replace(form, f"[{name}]")
    return _URL_PASSWORD.sub(r"\1[password]@", text)


def shown_url(url: str) -> str:
    """A URL for messages: without user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
