"""The client of an OpenAI-compatible server: one reply per request, each asked once, stored, and repeated after failures."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import urllib.parse
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from jaxalign.config.sections.endpoint import Endpoint
from jaxalign.endpoint.exchange import Batch, Call, Exchange
from jaxalign.endpoint.failures import REFUSALS, Failure, Fatal, Target, check_model
from jaxalign.endpoint.loop import LoopThread
from jaxalign.endpoint.pool import Pacing
from jaxalign.endpoint.records import MalformedReply, Reply, Request, read_reply
from jaxalign.endpoint.redaction import ApiKey, shown_url
from jaxalign.endpoint.spending import Spending
from jaxalign.endpoint.store import AnswerStore
from jaxalign.endpoint.transport import require_extra
from jaxalign.errors import UserError

T = TypeVar("T")


class Refused(UserError):
    """A server refused a request as such, for example because it does not have a field or a path."""


class Client:
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
        self, settings: Endpoint, store: AnswerStore, *, pacing: Pacing | None = None,
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

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply per request, in order. Equal requests are sent once.

        Raises:
          UserError: a request cannot succeed, no server answered for max_down seconds, or a reply is missing offline.
          BudgetReached: the budget is spent. As with other errors, requests in flight end first, and their replies are stored.
        """
        keys = [request.key for request in requests]
        replies: dict[str, Reply] = {}
        missing = dict(zip(keys, requests, strict=True))
        for key, raw in self._store.get_many(list(missing)).items():
            replies[key] = read_reply(missing.pop(key).path, json.loads(raw))
        self.spending.count("stored_hits", len(replies))
        if missing:
            self._require_online(f"{len(missing)} of {len(keys)} requests have no stored reply")
            for model in {str(request.body.get("model", "")) for request in missing.values()}:
                self.spending.price(model)
            self._run(lambda exchange: self._ask_all(exchange, missing, replies))
        return [replies[key] for key in keys]

    def attempt(self, request: Request) -> Reply | None:
        """The reply; None if the server refuses the request with a status of `REFUSALS`. Raises UserError like `ask`."""
        try:
            return self.ask([request])[0]
        except Refused:
            return None

    def list_models(self) -> list[str]:
        """The names of the models that the server lists.

        Raises:
          UserError: the server cannot be asked.
        """
        self._require_online("the models of the server are not stored")
        call = Call("models", None, _model_names, lambda names, text, target: names)
        return self._run(lambda exchange: exchange.complete(call, Batch()))

    def close(self) -> None:
        """Cancels requests in flight, closes the connections and ends the thread. A second call does nothing."""
        with self._lock:
            loop, exchange, self._loop, self._exchange = self._loop, self._exchange, None, None
        if loop is not None:
            loop.stop(exchange.close if exchange is not None else None)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_online(self, lack: str) -> None:
        if self._settings.offline:
            raise UserError(f"{lack}, but config.endpoint.offline=True forbids to ask the server; set it to False, or set "
                            f'config.endpoint.cache to the file that has them instead of "{self._store.path}"')

    def _run(self, work: Callable[[Exchange], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the loop. Turns its failure into a `UserError`, which refers to no exception of a library."""
        try:
            with self._lock:
                if self._loop is None:
                    self._loop = LoopThread()
                if self._exchange is None:
                    self._exchange = self._loop.run(self._connect())
                loop, exchange = self._loop, self._exchange
            return loop.run(self._start(work, exchange))
        except Failure as failure:
            sentence, kind = str(failure), failure.kind
        raise (Refused if kind in REFUSALS else UserError)(sentence)

    async def _start(self, work: Callable[[Exchange], Coroutine[Any, Any, T]], exchange: Exchange) -> T:
        exchange.breaker.restart()
        return await work(exchange)

    async def _connect(self) -> Exchange:
        return Exchange(self._settings, self._key, self.spending, self._pacing, self._say)

    async def _ask_all(self, exchange: Exchange, missing: dict[str, Request], replies: dict[str, Reply]) -> None:
        """Fills `replies` by a bounded number of workers, so that memory does not grow with the number of requests."""
        batch, pending = Batch(), iter(missing.items())
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
        self, exchange: Exchange, batch: Batch, pending: Iterator[tuple[str, Request]], replies: dict[str, Reply]
    ) -> None:
        for key, request in pending:
            if batch.is_stopped:
                return
            parse = functools.partial(read_reply, request.path)
            replies[key] = await exchange.complete(
                Call(request.path, request.body, parse, functools.partial(self._keep, key, request)), batch
            )

    def _keep(self, key: str, request: Request, reply: Reply, text: str, target: Target) -> Reply | Fatal:
        """Stores a reply. Returns the stored one, or the failure of a reply that cannot be used."""
        cost = self.spending.price(target.model).of(reply.usage)
        self.spending.count_reply(reply, cost)
        if wrong := check_model(reply.model, target):
            self._store.add_cost(cost)
            return wrong
        stored = self._store.put(key, request, text, reply.model, reply.usage, cost)
        if lack := self.spending.missing_usage(reply):
            return Fatal("usage", lack)
        return reply if stored == text else read_reply(request.path, json.loads(stored))


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
