"""Memory of the host that the compiler has freed."""

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
    """Makes this process return freed memory to the system whenever a program was compiled or read from the compile cache.

    glibc's malloc otherwise keeps most of what the compiler has freed, in up to eight arenas per processor core; from now on it
    makes one per core. Without glibc, this does nothing.
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
