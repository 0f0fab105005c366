"""Asks a judge outside of this process while the policy samples the next rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.parallel import hosts
from jaxalign.registry.judges import stage_judge


class Asker(NamedTuple):
    """Calls a judge. begin: starts a call, and returns a function that waits for its result. ahead: the number of calls that
    may be in progress while the policy samples."""

    begin: Callable[[Callable[[], Any]], Callable[[], Any]]
    ahead: int


@contextlib.contextmanager
def asker(config: Config, stage: str) -> Iterator[Asker]:
    """The asker of a stage.

    A call runs in a thread if the judge does not compute on the run's devices and the run has one process: several processes
    exchange the judge's results in the order of their calls. Otherwise a call ends before `begin` returns.
    """
    if stage_judge(config, stage).on_all_processes or hosts.count() > 1:

        def now(call: Callable[[], Any]) -> Callable[[], Any]:
            result = call()
            return lambda: result

        yield Asker(now, 0)
        return
    with ThreadPoolExecutor(1, "judge") as pool:
        try:
            yield Asker(lambda call: pool.submit(call).result, 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
