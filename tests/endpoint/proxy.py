"""A proxy between a client and a real server, which injects faults, goes away and returns, and revokes an API key."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import random
import threading
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from tests.endpoint.server import body, cut_off, silence, status

FAULTS = {
    "429": status(429, headers={"Retry-After": "0.1"}), "500": status(500), "cut off": cut_off,
    "garbage": body("<html>not a reply</html>"), "silence": silence,
}


class Proxy:
    """A proxy in a thread. It ends at the end of a `with` block.

    Args:
      upstream: the base URL of the real server.
      key: the API key that requests must have; None accepts every key.

    Attributes:
      share: the share of the requests that get a fault, in [0, 1].
      kinds: the names of these faults in `FAULTS`, which take turns.
      arrived: the number of requests for replies that reached the proxy.
      answered: the number of replies of the real server, by a hash of the request's body. A reply counts even if the client
        ends before it receives it.
      injected: the number of faults by kind.
      leave_at: the value of `arrived` at which the proxy goes away for `away` seconds, after it has delivered the replies to
        earlier requests; None: never.
      revoke_at: the value of `arrived` from which `key` is not accepted; None: never.
    """

    def __init__(self, upstream: str, key: str | None = None):
        self._upstream, self.key, self._port = upstream, key, 0
        self.share, self.kinds = 0.0, tuple(FAULTS)
        self.leave_at: int | None = None
        self.away = 1.0
        self.revoke_at: int | None = None
        self.reset()

    def reset(self) -> None:
        """Sets the counts to 0. The same requests then get the same sequence of faults as before."""
        self.arrived = 0
        self.answered: collections.Counter[str] = collections.Counter()
        self.injected: collections.Counter[str] = collections.Counter()
        self._random = random.Random(0)
        self._asking = 0
        self._is_leaving = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession()
        await self._start()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        """Accepts connections, on the same port as before."""
        app = web.Application()
        app.router.add_route("*", "/v1/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]

    async def _leave(self) -> None:
        while self._asking:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # The client reads the last replies before its other connections break.
        await self._runner.cleanup()
        await asyncio.sleep(self.away)
        self._is_leaving = False
        await self._start()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.method == "POST":
            self.arrived += 1
            if self.arrived == self.leave_at:
                self._is_leaving = True
                self._leaving = asyncio.create_task(self._leave())
        if self._is_leaving:
            return await silence(request)
        if self.key is not None:
            revoked = self.revoke_at is not None and self.arrived >= self.revoke_at
            sent = request.headers.get("Authorization")
            if revoked or sent != f"Bearer {self.key}":
                return await status(401, f"Incorrect API key provided: {sent}")(request)
        if request.method == "POST" and self._random.random() < self.share:
            kind = self.kinds[self.injected.total() % len(self.kinds)]
            self.injected[kind] += 1
            return await FAULTS[kind](request)
        return await self._ask(request, data)

    async def _ask(self, request: web.Request, data: bytes) -> web.Response:
        url = f"{self._upstream}/{request.match_info['path']}"
        headers = {"Content-Type": "application/json"}
        self._asking += 1
        try:
            async with self._session.request(request.method, url, data=data, headers=headers) as reply:
                content = await reply.read()
        finally:
            self._asking -= 1
        if request.method == "POST" and reply.status == 200:
            self.answered[hashlib.sha256(data).hexdigest()] += 1
        return web.Response(body=content, status=reply.status, content_type="application/json")
