"""Several devices simulated on one CPU."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_FLAG = re.compile(r"--xla_force_host_platform_device_count[= ](\d+)")
_THREADS = 4  # Per device.


def enough_threads(environ: MutableMapping[str, str] | None = None) -> None:
    """Gives XLA more threads when a CPU simulates several devices: raises NPROC. Call it before the first use of JAX.

    XLA's CPU executor has one thread per device, or per CPU if there are more CPUs, and a device that waits in a collective
    blocks one. With independent collectives a device may wait in two at the same time; another device then finds no free
    thread, and all devices deadlock.
    """
    environ = os.environ if environ is None else environ
    counts = _FLAG.findall(environ.get("XLA_FLAGS", "")) or [environ.get("JAX_NUM_CPU_DEVICES", "")]
    devices = int(counts[-1]) if counts[-1].isdecimal() else 1
    given = environ.get("NPROC", "")
    if devices > 1 and (int(given) if given.isdecimal() else 0) < _THREADS * devices:
        environ["NPROC"] = str(_THREADS * devices)
