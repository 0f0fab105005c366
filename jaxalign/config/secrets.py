"""Recognises API keys and passwords in text, so that they are neither stored in a config nor sent to a tracker."""

from __future__ import annotations

import os
import re

_USER = re.compile(r"://[^/\s@]*@")
_KEY = re.compile(r"(?<![0-9A-Za-z])(?:(?:local-)?[0-9a-f]{40}|wandb_v1_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,})"
                  r"(?![0-9A-Za-z])")
_NAMED = re.compile(r"(?i)((?:api_?key|token|secret|password)\s*[=:]\s*)[^\s&;,'\"]+")
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 8  # Shorter values of variables are dummies such as "EMPTY".


def secret_in(text: str) -> str:
    """Which secret a text contains, such as "a user or a password in a URL"; "" if it contains none."""
    if _USER.search(text):
        return "a user or a password in a URL"
    if _KEY.search(text) or _NAMED.search(text):
        return "what looks like an API key"
    for name, value in os.environ.items():
        if _VARIABLE.search(name) and len(value.strip()) >= _SHORTEST and value.strip() in text:
            return f"the value of the environment variable {name}"
    return ""


def hide_keys(text: str) -> str:
    """`text` with "[key]" in place of what looks like an API key, and without users and passwords of URLs."""
    return _NAMED.sub(r"\1[key]", _KEY.sub("[key]", _USER.sub("://", text)))
