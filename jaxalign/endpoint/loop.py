"""One event loop in a daemon thread, which other threads use through blocking calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_SECONDS = 5.0


class LoopThread:
    """An event loop that runs in its own thread until `stop`."""

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
