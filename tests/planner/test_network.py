"""Rings and the torus, computed by hand."""

from __future__ import annotations

import pytest
from planner.planned import cluster

from jaxalign.planner.hardware import gpu_cluster
from jaxalign.planner.network import bandwidths, gathered, reduced

ONE = dict(pipeline=1, data=1, fsdp=1, context=1, tensor=1)


def test_a_device_in_a_ring_of_four_receives_three_quarters_to_gather_and_twice_that_to_reduce():
    assert gathered(100.0, 4) == 75 and reduced(100.0, 4) == 150 and gathered(100.0, 1) == 0


@pytest.mark.parametrize(("topology", "mesh", "speed"), [
    ("v5p:4x4x4", dict(fsdp=64), {"fsdp": 6 * 100e9}),  # Three axes with wrap-around, two links of 100 GB/s on each.
    ("v5p:4x4x4", dict(fsdp=16, tensor=4), {"tensor": 2 * 100e9, "fsdp": 4 * 100e9}),
    ("v5p:2x2x4", dict(fsdp=16), {"fsdp": 3 * 100e9}),  # No cube, so no axis has wrap-around.
    ("v5e:4x4", dict(fsdp=4, tensor=4), {"tensor": 50e9, "fsdp": 50e9}),
    ("v5e:4x4", dict(fsdp=16), {"fsdp": 100e9}),
    ("v5e:16x16", dict(fsdp=256), {"fsdp": 4 * 50e9}),
    ("v5e:8x16", dict(data=8, tensor=16), {"tensor": 2 * 50e9, "data": 50e9}),
    ("v6e:8x8", dict(fsdp=32, tensor=2), {"tensor": 100e9, "fsdp": 2 * 100e9}),  # A part of one axis, then the rest.
])
def test_torus(topology, mesh, speed):
    assert bandwidths(cluster(topology), ONE | mesh) == speed


def test_gpus_of_several_hosts_use_the_network():
    assert bandwidths(gpu_cluster("H100x8"), ONE | dict(fsdp=8)) == {"fsdp": 450e9}
    assert bandwidths(gpu_cluster("H100x16"), ONE | dict(data=2, tensor=8)) == {"tensor": 450e9, "data": 50e9}


def test_slices_are_joined_by_the_network_of_the_hosts():
    found = bandwidths(cluster("v5e:4x4", slices=2), ONE | dict(data=2, fsdp=16), slices=2)
    assert found == {"fsdp": 100e9, "slices": 25e9 / 8}
