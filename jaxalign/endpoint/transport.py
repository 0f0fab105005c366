"""One HTTP exchange through the openai library: the raw response, or a failure."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from jaxalign.config.sections.endpoint import Endpoint
from jaxalign.endpoint.failures import Target, Transient, connection_failure, timeout_failure
from jaxalign.endpoint.redaction import ApiKey
from jaxalign.errors import UserError

_INSTALL = """requests to a server need the library {}, which is not installed; run `pip install "jaxalign[endpoint]"`"""


class Response(NamedTuple):
    """A complete response. text: the body without the API key; None if it is not UTF-8."""

    status: int
    headers: Mapping[str, str]
    text: str | None


def require_extra() -> None:
    """Raises UserError if a library of the extra "endpoint" is missing."""
    try:
        import aiohttp  # noqa: F401
        import aiolimiter  # noqa: F401
        import openai  # noqa: F401
        import stamina  # noqa: F401
    except ImportError as error:
        raise UserError(_INSTALL.format(error.name)) from None
    # The client prints its own line about failures; stamina would log a warning for each repetition.
    logging.getLogger("stamina").setLevel(logging.ERROR)


class Transport:
    """The connections to one URL. Created and used on one event loop.

    Args:
      url: the base URL, such as http://localhost:8000/v1.
    """

    def __init__(self, url: str, settings: Endpoint, key: ApiKey):
        import openai

        http = _http_library()
        self._timeout, self._key, self._raw = settings.timeout, key, http.Response
        self._status_error = openai.APIStatusError
        self._library_errors = (openai.OpenAIError, http.HTTPError)
        limits = http.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        # `exchange` limits the time. The libraries' own timeout is longer, because they also report refused connections as
        # timeouts. The transport of aiohttp needs a third less processor time per request than the default.
        longer = 2 * settings.timeout
        try:
            connections = openai.DefaultAioHttpClient(limits=limits, timeout=longer)
        except RuntimeError:
            raise UserError(_INSTALL.format("openai[aiohttp]")) from None
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key.value(), max_retries=0, timeout=longer, http_client=connections
        )

    async def exchange(self, path: str, body: Mapping[str, Any] | None, target: Target) -> Response | Transient:
        """Sends one request: POST with a JSON body, or GET without one. Failures are returned, not raised, so that no exception
        refers to the request, whose headers contain the key."""
        try:
            async with asyncio.timeout(self._timeout):
                if body is None:
                    found = await self._client.get(f"/{path}", cast_to=self._raw)
                else:
                    found = await self._client.post(f"/{path}", body=body, cast_to=self._raw)
        except self._status_error as error:
            found = error.response
        except TimeoutError:
            return timeout_failure(self._timeout, target)
        except (OSError, *self._library_errors) as error:
            failure = connection_failure(error, target)
            return Transient(failure.kind, self._key.redact(str(failure)), is_down=failure.is_down)
        try:
            text = self._key.redact(found.content.decode("utf-8"))
        except UnicodeDecodeError:
            text = None
        return Response(found.status_code, found.headers, text)

    async def close(self) -> None:
        await self._client.close()


def _http_library() -> ModuleType:
    """The HTTP library that the installed version of openai builds on: httpx, or httpx2 from openai 3 on."""
    import openai

    bases = openai.DefaultAsyncHttpxClient.__mro__
    name = next(base.__module__ for base in bases if base.__name__ == "AsyncClient")
    return sys.modules[name.partition(".")[0]]
