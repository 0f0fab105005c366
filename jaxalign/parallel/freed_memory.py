"""Returns host memory that the compiler has freed to the system."""

from __future__ import annotations

import ctypes
import functools
import os
import time

import jax

_ARENA_MAX = -8  # M_ARENA_MAX in glibc's malloc.h.
_SHARE = 0.02
"""The maximum share of the time that goes into returning memory."""


@functools.cache
def return_freed_memory() -> None:
    """Makes this process return freed memory to the system after a program was compiled or read from the compile cache.

    Otherwise, glibc's malloc keeps most of the memory that the compiler has freed, in up to eight arenas per processor core.
    This also limits malloc to one arena per core. Compilations in quick succession may share one return of memory (`_SHARE`).
    Without glibc, this does nothing.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    library.mallopt(_ARENA_MAX, os.cpu_count() or 1)
    earliest = 0.0

    def after_compiling(event: str, *_: float, **__: str | int) -> None:
        nonlocal earliest
        began = time.monotonic()
        if event.endswith("/backend_compile_duration") and began >= earliest:
            library.malloc_trim(0)
            ended = time.monotonic()
            earliest = ended + (ended - began) / _SHARE

    jax.monitoring.register_event_duration_secs_listener(after_compiling)
