"""What is said to XLA where one CPU plays several devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxalign.parallel.simulated import spare_threads

_FLAG = "--xla_force_host_platform_device_count"
_PROGRAM = """
import jax, jax.numpy as jnp, os
from jaxalign.parallel.simulated import spare_threads
spare_threads()
jnp.ones(3).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.parametrize("environ, expected", [
    ({}, None),
    ({"XLA_FLAGS": "--xla_dump_to=x"}, None),
    ({"XLA_FLAGS": f"{_FLAG}=1"}, None),
    ({"XLA_FLAGS": f"{_FLAG}=8", "NPROC": "5"}, "5"),
    ({"XLA_FLAGS": f"--xla_dump_to=x {_FLAG}=8"}, str(max(32, os.cpu_count()))),
])  # fmt: skip
def test_it_is_said_for_several_devices_alone_and_never_against_the_user(environ, expected):
    spare_threads(environ)
    assert environ.get("NPROC") == expected


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where Linux shows them")
def test_xla_takes_the_word():
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    environment |= {"XLA_FLAGS": f"{_FLAG}=4", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) >= 16
