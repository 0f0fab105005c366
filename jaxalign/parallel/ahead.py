"""Compiles programs in threads before they are called, while data and weights are being read.

An ordinary call of a jitted function uses the program that a thread of this process has compiled for the same shapes, with or
without a compile cache on disk. A call during the compilation waits for it. A call before the compilation compiles the program
itself, and the thread then reuses it. No program is compiled twice, and callers need no changes.
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
"""Maximum number of concurrent compilations. XLA compiles without the GIL; tracing is sequential."""


class Ahead:
    """Compiles programs in the background, in the order in which they are added, until the context ends.

    All processes of a run must add the same programs in the same order, because some compilers share work among processes.
    """

    def __init__(self, workers: int = 0):
        # One at a time with several processes, so that no process waits for a compilation that another has not started.
        most = min(WORKERS, os.cpu_count() or 1) if jax.process_count() == 1 else 1
        self._pool = ThreadPoolExecutor(workers or most, "compile")

    def add(self, step: Callable, arguments: tuple | Callable[[], tuple]) -> Future:
        """Adds a jitted function with its positional arguments; arrays are ShapeDtypeStructs, with a sharding for arrays that
        the call places and without one for numpy arrays. A callable computes the arguments when compilation starts.

        The future's result is the `jax.stages.Compiled`, or None on failure. A failure is logged; the call then raises the same
        error or compiles its program.

        """
        return self._pool.submit(_compiled, step, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the programs whose compilation has not started. Running compilations finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def log_errors(what: str) -> Iterator[None]:
    """A context manager that logs errors instead of raising them, since the first call compiles the program anyway. A UserError
    is dropped without a log line, since the call raises it again."""
    try:
        yield
    except UserError:
        pass
    except Exception as error:
        logging.getLogger("jaxalign").warning(
            f"{what} could not be compiled ahead; its first call will compile it: {type(error).__name__}: {error}"
        )


def _compiled(step: Callable, arguments: tuple | Callable[[], tuple]) -> jax.stages.Compiled | None:
    with log_errors(getattr(step, "__name__", repr(step))):
        given = arguments() if callable(arguments) else arguments
        return step.lower(*given).compile()
    return None
