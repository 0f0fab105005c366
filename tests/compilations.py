"""Records every compilation of the process."""

from __future__ import annotations

import threading

import jax

SEEN: list[tuple[str, str]] = []  # (function, thread) of every compilation
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **about: SEEN.append((about.get("fun_name", ""), threading.current_thread().name))
    if event == "/jax/core/compile/backend_compile_duration" else None
)


def compiled(name: str) -> list[str]:
    """The threads that compiled `name`."""
    return [thread for function, thread in SEEN if name in function]
