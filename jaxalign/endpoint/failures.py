"""Classification of failed requests: those that may pass, those that end the run, and refusals, which are replies."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxalign.json_text import parse_json

_RETRIED = {408, 409, 429}
_UNREACHABLE = {429, 502, 503, 504}
_FILTERED = {"content_filter", "content_policy_violation", "responsibleaipolicyviolation"}
_OVERFLOW = re.compile(
    r"context.?(length|size|window)|maximum model length|max_model_len|prompt is too long|exceed_context_size"
    r"|exceeds? the maximum number of tokens|longer than the (maximum )?model",
    re.IGNORECASE,
)
"""Messages of OpenAI, vLLM, SGLang, llama.cpp and other servers about prompts that exceed the context."""
REFUSALS = {f"http_{status}" for status in (400, 403, 404, 405, 422, 501)}
"""The kinds of failures by which a server may refuse a field or a path that it does not have."""
LONGEST_MESSAGE = 300
"""Characters of a server's message that an error repeats."""


class Failure(Exception):
    """A request without a usable reply. kind: a short name, by which failures are counted."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class Transient(Failure):
    """A failure that may pass.

    Attributes:
      wait: seconds that the server asks to wait; None if it does not ask.
      is_down: whether the server as a whole may be unreachable or overloaded. Otherwise the request may be the cause.
    """

    def __init__(self, kind: str, message: str, *, wait: float | None = None, is_down: bool = False):
        super().__init__(kind, message)
        self.wait, self.is_down = wait, is_down


class Fatal(Failure):
    """A failure that ends the run. Its message is that of the `UserError`."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The server and the model of a request, for messages. url: without credentials."""

    url: str
    model: str
    key_variable: str
    has_key: bool


def classify_status(status: int, headers: Mapping[str, str], text: str, target: Target) -> Failure | dict[str, Any]:
    """The failure that an HTTP status other than success means, or a reply body in the case of a content filter's refusal.

    Args:
      headers: with lower-case or case-insensitive names.
      text: the body, without the API key.
    """
    message, codes = server_message(text)
    stated = f'HTTP {status}: "{message}"' if message else f"HTTP {status}"
    if status in (400, 403) and codes & _FILTERED:
        empty = {"role": "assistant", "content": None}
        choice = {"index": 0, "finish_reason": "content_filter", "message": empty, "text": None}
        return {"model": target.model, "choices": [choice], "error": {"message": message}}
    if status in (400, 413, 422, 500) and ("context_length_exceeded" in codes or _OVERFLOW.search(message)):
        return Fatal("context", f'a request exceeds the context of model "{target.model}" at {target.url} ({stated}); shorten '
                     "the prompts or the constitution, or serve the model with a longer context")
    if status == 402 or (status == 429 and "insufficient_quota" in codes):
        return Fatal("quota", f"{target.url} states that the account has no quota left ({stated}); add credit, and repeat the "
                     "run, which continues from the stored answers")
    if status in _RETRIED or (status >= 500 and status != 501):
        return Transient(f"http_{status}", f"{target.url} answered {stated}", wait=_retry_after(headers),
                         is_down=status in _UNREACHABLE)
    if status in (401, 403):
        cause = "rejected the API key in" if target.has_key else "requires an API key, but none is set in"
        model = f'model "{target.model}"' if target.model else "the server"
        return Fatal(f"http_{status}", f"{target.url} {cause} the environment variable {target.key_variable} ({stated}); "
                     f"set it to a key that may use {model}, or set config.endpoint.key_variable to another variable")
    if status == 404:
        return Fatal("http_404", f'{target.url} does not have the path or the model "{target.model}" ({stated}); set '
                     "config.endpoint.url to a base URL, which usually ends with /v1, and config.endpoint.model to a name that "
                     "the server lists")
    return Fatal(f"http_{status}", f'{target.url} rejected a request to model "{target.model}" ({stated}); use a model and a '
                 "server that support this request, or correct the field that the server names")


def check_model(stated: str, target: Target) -> Fatal | None:
    """The failure of a reply from another model than asked.

    Servers may add a date or a version to the name, or state the path of the model's file.
    """
    asked, name = target.model.casefold(), stated.casefold()
    asked_file, named_file = (path.rstrip("/").rpartition("/")[2] for path in (asked, name))
    if not asked or not name or name.startswith(asked) or named_file == asked_file:
        return None
    return Fatal("model", f'{target.url} answered a request to model "{target.model}" with model "{stated}"; set '
                 "config.endpoint.model to the name under which the server answers")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds of the headers retry-after-ms and retry-after; None without them, or if they state no positive time."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * unit
        except ValueError:
            seconds = _seconds_until(text)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    return None


def _seconds_until(text: str) -> float:
    try:
        then = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return math.nan
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.UTC)
    return (then - datetime.datetime.now(datetime.UTC)).total_seconds()


def server_message(text: str) -> tuple[str, set[str]]:
    """The message in an error body, shortened, and its codes in lower case."""
    try:
        body = parse_json(text)
    except ValueError:
        body = text
    codes: set[str] = set()
    while isinstance(body, dict):
        inner = body.get("innererror")
        for part in (body, inner if isinstance(inner, dict) else {}):
            codes |= {str(part[name]).lower() for name in ("code", "type") if part.get(name) is not None}
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), "")
    message = body if isinstance(body, str) else json.dumps(body)
    return " ".join(message.split())[:LONGEST_MESSAGE], codes
