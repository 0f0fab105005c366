"""The client of an OpenAI-compatible server: one reply per request, each asked once, stored, and repeated after failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import urllib.parse
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.endpoint.exchange import Call, CallBatch, Exchange
from jaxalign.endpoint.failures import REFUSALS, Failure, Fatal, Target, check_model
from jaxalign.endpoint.pool import Pacing
from jaxalign.endpoint.records import EndpointRequest, MalformedReply, Reply, read_reply
from jaxalign.endpoint.redaction import ApiKey, shown_url
from jaxalign.endpoint.spending import Spending
from jaxalign.endpoint.store import AnswerStore
from jaxalign.endpoint.transport import require_extra
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

T = TypeVar("T")
_CANCEL_SECONDS = 5.0


class LoopThread:
    """An event loop that runs in its own thread until `stop`. Other threads use it through blocking calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxalign-endpoint", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine."""
        finished = threading.Event()

        async def tracked() -> T:
            try:
                return await coroutine
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                finished.wait(_CANCEL_SECONDS)

    def stop(self, close: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancels the running coroutines, runs `close` on the loop, and ends the thread."""

        async def cancel_all() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if close is not None:
                await close()
            await self._loop.shutdown_default_executor()

        try:
            self.run(cancel_all())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CANCEL_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()


class RequestRefused(UserError):
    """A server refused a request as such, for example because it does not have a field or a path."""


class Client(contextlib.AbstractContextManager):
    """Answers requests from the store, and asks the server for the others.

    Methods block, and may be called from several threads. An event loop in a daemon thread does the work; it starts with the
    first request that has no stored reply.

    Args:
      settings: the section `endpoint` of the config.
      store: the stored replies. The client does not close it.
      pacing: waiting times after failures.
      say: takes the lines that report a pause and its end; None prints them.

    Attributes:
      spending: counts of requests, tokens, failures and money.

    Raises:
      UserError: a library of the extra "endpoint" is missing, or no usable URL is set. Neither is needed offline.
    """

    def __init__(
        self, settings: EndpointConfig, store: AnswerStore, *, pacing: Pacing | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self._settings, self._store, self._pacing = settings, store, pacing or Pacing()
        self._say = say or functools.partial(print, flush=True)
        self._key = ApiKey(settings.key_variable)
        self.spending = Spending(settings, store)
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._exchange: Exchange | None = None
        if not settings.offline:
            require_extra()
            _check_urls(settings.url)

    def ask(self, requests: Sequence[EndpointRequest]) -> list[Reply]:
        """One reply per request, in order. Equal requests are sent once.

        Raises:
          UserError: a request cannot succeed, no server answered for max_down seconds, or a reply is missing offline.
          BudgetReached: the budget is spent. As with other errors, requests in flight end first, and their replies are stored.
        """
        keys = [request.key for request in requests]
        replies: dict[str, Reply] = {}
        missing = dict(zip(keys, requests, strict=True))
        for key, raw in self._store.get_many(list(missing)).items():
            replies[key] = read_reply(missing.pop(key).path, parse_json(raw))
        self.spending.count("stored_hits", len(replies))
        if missing:
            lack = f"{len(missing)} of {len(keys)} requests have no stored reply"
            self._run(lack, lambda exchange: self._ask_all(exchange, missing, replies))
        return [replies[key] for key in keys]

    def attempt(self, request: EndpointRequest) -> Reply | None:
        """The reply; None if the server refuses the request with a status of `REFUSALS`. Raises UserError like `ask`."""
        try:
            return self.ask([request])[0]
        except RequestRefused:
            return None

    def list_models(self) -> list[str]:
        """The names of the models that the server lists.

        Raises:
          UserError: the server cannot be asked.
        """
        call = Call("models", None, _model_names, lambda names, text, target: names)
        return self._run("the models of the server are not stored", lambda exchange: exchange.complete(call, CallBatch()))

    def close(self) -> None:
        """Cancels requests in flight, closes the connections and ends the thread. A second call does nothing."""
        with self._lock:
            loop, exchange, self._loop, self._exchange = self._loop, self._exchange, None, None
        if loop is not None:
            loop.stop(exchange.close if exchange is not None else None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, lack: str, work: Callable[[Exchange], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the loop. Turns its failure into a `UserError`, which refers to no exception of a library.

        lack: the replies that are not stored, for the error of a client that is offline.
        """
        if self._settings.offline:
            raise UserError(f"{lack}, but config.endpoint.offline=True forbids to ask the server; set it to False, or set "
                            f'config.endpoint.cache to the file that has them instead of "{self._store.path}"')
        try:
            with self._lock:
                if self._loop is None:
                    self._loop = LoopThread()
                loop, exchange = self._loop, self._loop.run(self._begin())
            return loop.run(work(exchange))
        except Failure as failure:
            sentence, kind = str(failure), failure.kind
        raise (RequestRefused if kind in REFUSALS else UserError)(sentence)

    async def _begin(self) -> Exchange:
        """The exchange, which the first call creates, ready for another call."""
        if self._exchange is None:
            self._exchange = Exchange(self._settings, self._key, self.spending, self._pacing, self._say)
        self._exchange.breaker.restart()
        return self._exchange

    async def _ask_all(self, exchange: Exchange, missing: dict[str, EndpointRequest], replies: dict[str, Reply]) -> None:
        """Fills `replies` by a bounded number of workers, so that memory does not grow with the number of requests."""
        for model in {str(request.body.get("model", "")) for request in missing.values()}:
            self.spending.prices.of(model)  # A missing price is an error before any request is sent.
        batch, pending = CallBatch(), iter(missing.items())
        workers = [
            asyncio.create_task(self._work(exchange, batch, pending, replies))
            for _ in range(min(self._settings.concurrency, len(missing)))
        ]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            error = next((worker.exception() for worker in workers if worker.done() and worker.exception()), None)
            if error is None:
                return
            batch.is_stopped = True
            for worker in workers:
                # Requests in flight are paid for; their replies are worth the wait.
                if worker not in batch.sending:
                    worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        raise error

    async def _work(
        self, exchange: Exchange, batch: CallBatch, pending: Iterator[tuple[str, EndpointRequest]], replies: dict[str, Reply]
    ) -> None:
        for key, request in pending:
            if batch.is_stopped:
                return
            parse = functools.partial(read_reply, request.path)
            replies[key] = await exchange.complete(
                Call(request.path, request.body, parse, functools.partial(self._keep, key, request)), batch
            )

    def _keep(self, key: str, request: EndpointRequest, reply: Reply, text: str, target: Target) -> Reply | Fatal:
        """Stores a reply. Returns the stored one, or the failure of a reply that cannot be used."""
        cost = self.spending.prices.of(target.model).of(reply.usage)
        self.spending.count_reply(reply, cost)
        if wrong := check_model(reply.model, target):
            self._store.add_cost(cost)
            return wrong
        stored = self._store.put(key, request, text, reply.model, reply.usage, cost)
        budget = self._settings.budget
        if budget > 0 and not any(reply.usage) and reply.finish != "content_filter":  # The cost of the reply is unknown.
            return Fatal("usage", f"config.endpoint.budget is {budget:g}, but the server does not state the number of tokens "
                         "of its replies; set config.endpoint.budget=0, or use a server that states usage")
        return reply if stored == text else read_reply(request.path, parse_json(stored))


def _check_urls(urls: Sequence[str]) -> None:
    if not urls:
        raise UserError("config.endpoint.url is empty; set it to the base URL of a server, such as http://localhost:8000/v1")
    for url in urls:
        try:
            parts = urllib.parse.urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise UserError(f'config.endpoint.url contains "{shown_url(url)}"; a base URL such as http://localhost:8000/v1 is '
                            "expected")


def _model_names(raw: Any) -> list[str]:
    models = raw.get("data") if isinstance(raw, dict) else None
    if not isinstance(models, list):
        raise MalformedReply("the list of models has no data")
    return [str(model["id"]) for model in models]
