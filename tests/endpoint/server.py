"""An OpenAI-compatible server on loopback whose faults a test chooses."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

Fault = Callable[[web.Request], Any]


def text_of(body: Mapping[str, Any]) -> str:
    """The server's reply to a request: a hash of its last message, so that the test knows each reply."""
    return hashlib.md5(body["messages"][-1]["content"].encode()).hexdigest()


def reply_to(body: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text_of(body)}
    return {
        "id": "1", "object": "chat.completion", "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5}, **changes,
    }


def status(code: int, error: Any = "injected", headers: Mapping[str, str] | None = None) -> Fault:
    """A fault that answers an HTTP status with an error object."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": error if isinstance(error, dict) else {"message": error}}, status=code,
                                 headers=headers)

    return answer


def body(content: str) -> Fault:
    """A fault that answers HTTP 200 with `content`."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=content, content_type="application/json")

    return answer


async def cut_off(request: web.Request) -> web.StreamResponse:
    """Announces 1,000 bytes, sends a few of them and closes the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def silence(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


class Server:
    """A server in a thread.

    Args:
      delay: seconds until each reply.
      fault_of: called with the number of the request, from 0, and its body; returns a fault, or None for a correct reply.
      port: 0 chooses a free port.

    Attributes:
      bodies: the bodies of all requests, in order.
      targets: the paths of all requests with their queries, in order.
      most: the largest number of requests in flight.
      key: the API key that is accepted; None accepts every key.
    """

    def __init__(self, delay: float = 0.0, fault_of: Callable[[int, Any], Fault | None] = lambda number, body: None,
                 port: int = 0):
        self.delay, self.fault_of, self.port = delay, fault_of, port
        self.bodies: list[dict[str, Any]] = []
        self.targets: list[str] = []
        self.times: list[float] = []
        self.authorizations: collections.Counter[str] = collections.Counter()
        self.in_flight = self.most = 0
        self.key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Server:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return await status(401, f"bad key {request.headers.get('Authorization')}")(request)
        return web.json_response({"object": "list", "data": [{"id": "judge", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        number = len(self.bodies)
        self.bodies.append(asked)
        self.targets.append(request.path_qs)
        self.times.append(self._now())
        self.authorizations[request.headers.get("Authorization", "")] += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
                return await status(401, f"Incorrect API key provided: {request.headers.get('Authorization')}")(request)
            fault = self.fault_of(number, asked)
            if fault is not None:
                return await fault(request)
            if self.delay:
                await asyncio.sleep(self.delay)
            return web.json_response(reply_to(asked))
        finally:
            self.in_flight -= 1

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
