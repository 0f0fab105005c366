"""With several simulated CPU devices, XLA has enough threads for each device to wait in more than one collective."""

from __future__ import annotations

import pathlib

import jax
import pytest

from jaxalign.parallel.simulated import enough_threads


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, None), ({"XLA_FLAGS": "--xla_dump_to=x"}, None), ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, None),
     ({"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8 --b=2"}, "32"), ({"JAX_NUM_CPU_DEVICES": "2"}, "8"),
     ({"JAX_NUM_CPU_DEVICES": "2", "NPROC": "4"}, "8"), ({"JAX_NUM_CPU_DEVICES": "2", "NPROC": "64"}, "64")],
)
def test_the_number_of_threads_depends_on_the_number_of_devices(environ, expected):
    enough_threads(environ)
    assert environ.get("NPROC") == expected


def test_xla_has_these_threads():
    """XLA's threads have the name of their pool; these tests run on eight devices."""
    jax.devices()
    names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    assert names.count("tf_XLAEigen") >= 16
