"""Devices that one CPU plays."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_FLAG = re.compile(r"--xla_force_host_platform_device_count[= ](\d+)")
_THREADS = 4  # For each device.


def enough_threads(environ: MutableMapping[str, str] | None = None) -> None:
    """Gives XLA more threads where a CPU plays several devices: sets NPROC, if it is not as high; before JAX's first use.

    XLA's executor for CPUs has as many threads as there are devices, or CPUs if they are more, and a device that waits for the
    others in a collective holds one. A program whose collectives do not wait for each other lets one device wait in two: then
    another finds no thread, and all wait for ever.
    """
    environ = os.environ if environ is None else environ
    found = _FLAG.findall(environ.get("XLA_FLAGS", "")) or [environ.get("JAX_NUM_CPU_DEVICES", "")]
    devices = int(found[-1]) if found[-1].isdecimal() else 1
    given = environ.get("NPROC", "")
    if devices > 1 and (int(given) if given.isdecimal() else 0) < _THREADS * devices:
        environ["NPROC"] = str(_THREADS * devices)
