"""Several devices played by one CPU."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_THREADS = 4  # a device


def spare_threads(environ: MutableMapping[str, str] | None = None) -> None:
    """Gives XLA threads to spare where `XLA_FLAGS` makes one CPU play several devices. To be called before JAX's first use.

    XLA's pools have as many threads as there are cores or devices, whichever is more. A device that waits for others in a
    collective keeps a thread, and it may wait in several that do not depend on each other: on a busy machine all threads
    can come to wait for one that none is left to run, for ever. What XLA takes for the number of cores is NPROC.
    """
    environ = os.environ if environ is None else environ
    played = re.search(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    if played and int(played[1]) > 1:
        environ.setdefault("NPROC", str(max(_THREADS * int(played[1]), os.cpu_count() or 1)))
