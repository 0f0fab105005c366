"""The base of the built-in trackers. A tracker asks its service which steps it has, so that each step arrives there once."""

from __future__ import annotations

import abc
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

from jaxalign.config import TrackingConfig
from jaxalign.config.secrets import hide_keys
from jaxalign.endpoint.redaction import redact_secrets
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import Metrics
from jaxalign.tracking.sinks.attachments import Attachments
from jaxalign.tracking.sinks.identity import RunIdentity, identify

_LONGEST = 400  # Messages of services contain whole SQL statements and stacks.


class Sink(abc.ABC):
    """A tracker that sends to a service, and knows what the service has of the run.

    Args:
      settings: the project, group and so on; None for those of the config that `start` receives.

    Attributes:
      settings: the settings in use, once started.
      run: the identity of the run, once started.
    """

    settings: TrackingConfig
    run: RunIdentity
    _next: int
    _names: set[str]

    def __init__(self, settings: TrackingConfig | None = None):
        self._settings = settings

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the run of the folder `config["directory"]`, as in `Tracker.start`."""
        self.settings = self._settings or _settings_of(config)
        self.run = identify(config, self.settings)
        self.open(plain_settings(config))

    @abc.abstractmethod
    def open(self, config: Mapping[str, Any]) -> None:
        """Opens the run `self.run`, new or not, and sends its settings, which are flat and without secrets. Sets `_next` and,
        unless the class overrides `attached`, `_names`."""

    def next_step(self) -> int:
        """The first step that the service does not have. Called after `start`."""
        return self._next

    @abc.abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Sends a step."""

    def attached(self) -> set[str]:
        """The names of the attachments that the service has."""
        return self._names

    @abc.abstractmethod
    def attach(self, attachments: Attachments, step: int) -> None:
        """Sends attachments. step: the step after the last one of the run."""

    @abc.abstractmethod
    def finish(self, status: str) -> None:
        """Sends everything that is buffered and closes the run."""


@contextlib.contextmanager
def library(tracker: str, package: str) -> Iterator[None]:
    """A context for the imports of a tracker's library. Raises UserError if it is not installed."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"tracker {tracker!r} needs the package {package} ({error}); install it with "
                        "`pip install 'jaxalign[track]'`") from None


def clean(text: str) -> str:
    """A text without secrets, for a service."""
    return hide_keys(redact_secrets(text))


def reason(error: BaseException) -> str:
    """An error of a service in one line: its type and its message, shortened and without secrets."""
    message = " ".join(clean(str(error)).split())
    return f"{type(error).__name__}: {message if len(message) <= _LONGEST else message[:_LONGEST] + '...'}"


def plain_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run by dotted name, as text, numbers and booleans, without secrets and without the tracker's own
    fields. Lists are written as JSON."""
    plain: dict[str, Any] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (bool, int, float)):
            plain[name] = value
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            plain[name] = clean(text)

    add({name: value for name, value in config.items() if name not in ("directory", "workdir", "step", "tracking")}, "")
    return plain


def _settings_of(config: Mapping[str, Any]) -> TrackingConfig:
    """The settings in a run's config, as plain values; the defaults if there are none."""
    section = config.get("tracking") or {}
    usual = TrackingConfig()
    known = {name: section.get(name, value) for name, value in vars(usual).items()}
    return TrackingConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})


def call_within(seconds: float, action: Any, what: str) -> Any:
    """The result of an action that may wait for a network, in a thread. Raises TimeoutError after so many seconds."""
    result: futures.Future[Any] = futures.Future()

    def work() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # Raised again in the calling thread.
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not futures.wait([result], seconds).done:
        raise TimeoutError(f"{what} did not end within {seconds:g} seconds")
    return result.result()
