"""Programs compiled in threads before they are called, while data and weights are read.

A jitted function that has been compiled for shapes is found by its ordinary call with arrays of those shapes, in this process,
with or without a compile cache on disk. A call that comes while its program is being compiled waits for it; one that comes
before compiles by itself, and the thread finds that. So nothing is compiled twice, and whoever calls need not know of this.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax

from jaxalign.errors import UserError

WORKERS = 4
"""Programs at once, at most. XLA compiles without Python's lock; tracing takes turns."""


class Ahead:
    """Compiles in the background, in the order in which programs are added, until it is left as a context.

    All processes of a run are to add the same programs in one order: some compilers share their work among processes.
    """

    def __init__(self, workers: int = 0):
        alone = jax.process_count() == 1  # Else one after another, so that no process waits for what another has not begun.
        self._pool = ThreadPoolExecutor(workers or (min(WORKERS, os.cpu_count() or 1) if alone else 1), "compile")

    def add(self, step: Callable, arguments: tuple | Callable[[], tuple]) -> Future:
        """Compiles a jitted function for its arguments in their order, arrays as ShapeDtypeStructs, which have a sharding where
        the call's arrays are placed, and none for numpy arrays. A callable gives the arguments when the turn comes.

        The future's result is the `jax.stages.Compiled`, or None where that failed: the log says so, and the call itself will
        meet the same error, or compile what it needs.
        """
        return self._pool.submit(_compiled, step, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the programs that no thread has begun to compile. Those that are being compiled are finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def told_only(what: str) -> Iterator[None]:
    """Within it an error is only told: what was to be compiled ahead is compiled when it is called. A UserError is left to the
    call, which will raise it."""
    try:
        yield
    except UserError:
        pass
    except Exception as error:
        logging.getLogger("jaxalign").warning(
            f"{what} could not be compiled ahead of its first call, which will compile it: {type(error).__name__}: {error}"
        )


def _compiled(step: Callable, arguments: tuple | Callable[[], tuple]) -> jax.stages.Compiled | None:
    with told_only(getattr(step, "__name__", repr(step))):
        given = arguments() if callable(arguments) else arguments
        return step.lower(*given).compile()
    return None
