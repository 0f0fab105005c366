"""Events of a run, logged as warnings and posted to a webhook.

The URL comes from an environment variable and may contain a secret, as those of Slack do: no file, message or exception of the
run contains it.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import queue
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from jaxalign.errors import UserError
from jaxalign.tracking.alerts import Alert

_LOG = logging.getLogger("jaxalign")
_TIMEOUT, _JOIN_SECONDS, _MOST_WAITING = 10.0, 10.0, 100
_POST: contextvars.ContextVar[Callable[[Mapping[str, Any]], None] | None] = contextvars.ContextVar("post", default=None)


class Webhook:
    """Posts JSON objects to a URL from a thread of its own, so that a slow server does not delay training.

    A failure is logged once. Objects that cannot be posted are dropped.

    Args:
      variable: the name of the environment variable with the URL.

    Raises:
      UserError: the variable is not set, or is not an http or https URL.
    """

    def __init__(self, variable: str):
        self._variable, self._url = variable, os.environ.get(variable, "").strip()
        if not self._url:
            raise UserError(f"config.tracking.webhook names the environment variable {variable}, which is not set; set it to "
                            "the URL of the webhook")
        if urllib.parse.urlsplit(self._url).scheme not in ("http", "https"):
            raise UserError(f"the environment variable {variable} (config.tracking.webhook) is not a URL that begins with "
                            "http:// or https://; correct it")
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="jaxalign-webhook", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Waits some seconds for objects that are still to be posted. Later ones are dropped."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_JOIN_SECONDS)

    def post(self, content: Mapping[str, Any]) -> None:
        """Posts an object soon. Returns at once."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(content)

    def _work(self) -> None:
        while (content := self._waiting.get()) is not None:
            request = urllib.request.Request(self._url, json.dumps(content).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT):
                    pass
            except Exception as error:  # Its text may contain the URL.
                if not self._failed:
                    code, cause = getattr(error, "code", None), getattr(error, "reason", None)  # URLError has the cause.
                    name = type(cause if isinstance(cause, Exception) else error).__name__
                    reason = name if code is None else f"HTTP status {code}"
                    _LOG.warning(f"the webhook of {self._variable} failed ({reason}); the run goes on, and later failures are "
                                 "not logged")
                self._failed = True


@contextlib.contextmanager
def posted_to(post: Callable[[Mapping[str, Any]], None] | None) -> Iterator[None]:
    """Passes the alerts of training in the body of the `with` statement to `post`, as JSON objects; None: only logs them."""
    token = _POST.set(post)
    try:
        yield
    finally:
        _POST.reset(token)


def announce(stage: str, alert: Alert) -> None:
    """Logs an alert as a warning, and posts it."""
    _LOG.warning(f"[{stage}] {alert.text()}")
    post = _POST.get()
    if post is not None:
        post({"event": "alert", "stage": stage, "alert": alert.name, "step": alert.step, "text": f"[{stage}] {alert.text()}"})
