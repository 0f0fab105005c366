"""Topologies by name: valid names, errors and their texts, and devices if the TPU compiler is installed."""

from __future__ import annotations

import importlib.util
import os

import jax
import pytest

from jaxalign.errors import UserError
from jaxalign.planner import topology
from jaxalign.planner.topology import parse_topology, topology_devices

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")


@pytest.mark.parametrize(("text", "chips"), [("v5e:4x4", 16), ("v6e:8x8", 64), ("v5p:4x4x8", 128), ("v4:2x2x1", 4),
                                             ("v5e:1x1", 1)])
def test_chips(text, chips):
    found = parse_topology(text)
    assert (found.chips, found.name) == (chips, text) and parse_topology(text, slices=2).chips == 2 * chips


@pytest.mark.parametrize(("text", "sentence"), [
    ("v5e4x4", r"'v5e4x4'; expected a generation and the chips along each axis, as in v5e:4x4 or v5p:4x4x8"),
    ("v5e:", "a generation and the chips along each axis"),
    ("v5x:4x4", r"'v5x' is not one of the known TPU generations: v4, v5e, v5p, v6e, or GPUs: a100, .*; did you mean v5[ep]\?"),
    ("v5p:4x4", "'v5p:4x4' with 2 axes; v5p has 3, as in v5p:4x4x8"),
    ("v6e:4x4x4", "with 3 axes; v6e has 2, as in v6e:4x4"),
    ("v5e:3x3", "'v5e:3x3', but v5e is not offered in this shape; the next larger one is v5e:4x4$"),
    ("v5e:2x6", "the next larger one is v5e:4x4$"),
    ("v6e:6x6", "the next larger one is v6e:8x8$"),
    ("v5e:1x2", "the next larger one is v5e:2x2$"),
    ("v5p:2x2x0", "the next larger one is v5p:2x2x1$"),
    ("v4:2x2x3", "the next larger one is v4:2x2x4$"),
    ("v4:6x6x2", "the next larger one is v4:4x8x8$"),
    ("v5p:8x4x4", "the next larger one is v5p:4x4x8$"),
])
def test_an_invalid_topology_is_refused_with_a_remedy(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_topology(text)


def test_a_mesh_larger_than_the_topology_is_refused():
    with pytest.raises(UserError, match="the mesh has 32 devices, but topology v5e:4x4 has 16"):
        topology_devices(parse_topology("v5e:4x4"), 32)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jaxalign\[aot\]'"):
        topology_devices(parse_topology("v5e:4x4"))


@needs_libtpu
@pytest.mark.parametrize(("text", "kind"), [("v4:2x2x2", "TPU v4"), ("v5e:2x4", "TPU v5 lite"), ("v5p:2x2x2", "TPU v5"),
                                            ("v6e:2x2", "TPU v6 lite"), ("v5e:1x1", "TPU v5 lite")])
def test_a_topology_has_one_device_per_chip(text, kind):
    parsed = parse_topology(text)
    devices = topology_devices(parsed)
    assert len(devices) == parsed.chips and {device.device_kind for device in devices} == {kind}


@needs_libtpu
def test_slices_and_the_first_devices_of_a_topology():
    assert len(topology_devices(parse_topology("v5e:2x2", slices=2))) == 8
    assert len(topology_devices(parse_topology("v5e:2x2"), 3)) == 3


@needs_libtpu
def test_options_for_the_cpu_in_xla_flags_are_hidden_from_the_tpu_compiler():
    """libtpu ends the process on an option that it does not know, such as one for the CPU; tests/conftest.py sets one."""
    given = os.environ["XLA_FLAGS"]
    assert "--xla_cpu_use_fusion_emitters" in given
    device = topology_devices(parse_topology("v5e:2x2"))[0]
    x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    assert jax.jit(lambda x: x @ x.T).lower(x).compile().memory_analysis().output_size_in_bytes > 0
    assert os.environ["XLA_FLAGS"] == given
