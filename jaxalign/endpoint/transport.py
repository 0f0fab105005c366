"""One HTTP exchange: the raw response, or a failure."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxalign import __version__
from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.endpoint.failures import LONGEST_MESSAGE, Target, Transient
from jaxalign.endpoint.redaction import ApiKey
from jaxalign.errors import UserError

_INSTALL = """requests to a server need the library {}, which is not installed; run `pip install "jaxalign[endpoint]"`"""


class HTTPResponse(NamedTuple):
    """A complete response. headers: case-insensitive. text: the body without the API key; None if it is not UTF-8."""

    status: int
    headers: Mapping[str, str]
    text: str | None


def require_extra() -> None:
    """Raises UserError if a library of the extra "endpoint" is missing."""
    try:
        import aiohttp  # noqa: F401
        import aiolimiter  # noqa: F401
        import stamina  # noqa: F401
    except ImportError as error:
        raise UserError(_INSTALL.format(error.name)) from None
    # The client prints its own line about failures; stamina would log a warning for each repetition.
    logging.getLogger("stamina").setLevel(logging.ERROR)


class Transport:
    """The connections to one URL. Created and used on one event loop.

    Args:
      url: the base URL, such as http://localhost:8000/v1. A query is sent with each request. A user and password in it take the
        place of the API key.

    Attributes:
      session: the connections; whoever creates a transport closes them.
    """

    def __init__(self, url: str, settings: EndpointConfig, key: ApiKey):
        import aiohttp

        self._url, self._timeout, self._key = urllib.parse.urlsplit(url), settings.timeout, key
        self._library_error = aiohttp.ClientError
        headers = {"Content-Type": "application/json", "User-Agent": f"jaxalign/{__version__}"}
        if key.is_set and not self._url.username:
            headers["Authorization"] = f"Bearer {key.value}"
        # `exchange` limits the time of the whole request, so that the library's own limits are not needed.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.concurrency), headers=headers, timeout=aiohttp.ClientTimeout(),
            proxy=_environment_proxy(self._url),
        )

    async def exchange(self, path: str, body: Mapping[str, Any] | None, target: Target) -> HTTPResponse | Transient:
        """Sends one request: POST with a JSON body, or GET without one. Failures are returned, not raised, so that no exception
        refers to the request, whose headers contain the key."""
        url = urllib.parse.urlunsplit(self._url._replace(path=f"{self._url.path.rstrip('/')}/{path}"))
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        try:
            async with asyncio.timeout(self._timeout):
                async with self.session.request("GET" if data is None else "POST", url, data=data) as response:
                    content = await response.read()
        except TimeoutError:
            sentence = f"{target.url} gave no complete reply within config.endpoint.timeout={self._timeout:g} seconds"
            return Transient("timeout", sentence, is_down=True)
        except (OSError, self._library_error) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            detail = " ".join(str(cause).split())[:LONGEST_MESSAGE]
            sentence = self._key.redact(f"the connection to {target.url} failed ({type(cause).__name__}: {detail})")
            return Transient("connection", sentence, is_down=True)
        try:
            text = self._key.redact(content.decode("utf-8"))
        except UnicodeDecodeError:
            text = None
        return HTTPResponse(response.status, response.headers, text)


def _environment_proxy(url: urllib.parse.SplitResult) -> str | None:
    """The proxy that the environment variables HTTP_PROXY, HTTPS_PROXY and NO_PROXY set for a URL.

    Raises:
      UserError: it is not an HTTP proxy.
    """
    proxy = urllib.request.getproxies().get(url.scheme)
    if not proxy or urllib.request.proxy_bypass(url.hostname or ""):
        return None
    if urllib.parse.urlsplit(proxy).scheme not in ("http", "https"):
        raise UserError(f"the environment variable {url.scheme.upper()}_PROXY does not name an HTTP proxy; set it to a URL "
                        "that starts with http://, or add the host of config.endpoint.url to NO_PROXY")
    return proxy
