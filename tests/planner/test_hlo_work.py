"""FLOPs of compiled programs: products computed by hand, as a CPU's compiler and a TPU's write them."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxalign.planner.hlo_text import parse
from jaxalign.planner.hlo_work import flops
from jaxalign.planner.topology import parse_topology, topology_devices

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
PROGRAMS = {
    # [8, 16] x [16, 32], five times
    "loop": (lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), x, None, 5)[0],
             [(8, 16), (16, 32)], 5 * 2 * (2 * 8 * 16 * 32)),
    # three layers forward, and twice that backward; the first layer's input has no gradient
    "gradient": (jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, w)[0])),
                 [(3, 16, 16), (8, 16)], 3 * 3 * (2 * 8 * 16 * 16)),
    # a product for each of 4 rows and 6 heads
    "batch": (lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), [(4, 8, 6, 16), (4, 24, 6, 16)], 4 * 6 * (2 * 8 * 24 * 16)),
    # a window of 3 over 10 numbers, padded at both ends
    "window": (lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
               [(2, 10, 4), (3, 4, 8)], 2 * 2 * 4 * 8 * (3 * 10 - 2)),
    "strided": (lambda x, w: jax.lax.conv_general_dilated(x, w, (2,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")),
                [(2, 11, 4), (3, 4, 8)], 2 * 2 * 4 * 8 * 3 * 5),
}


def counted(fn, shapes, device) -> int:
    given = [jax.ShapeDtypeStruct(shape, np.float32, sharding=SingleDeviceSharding(device)) for shape in shapes]
    return flops(parse(jax.jit(fn).lower(*given).compile().as_text()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_by_hand(name):
    fn, shapes, expected = PROGRAMS[name]
    assert counted(fn, shapes, jax.devices()[0]) == expected


@needs_libtpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_by_hand_as_a_tpu_compiler_writes_them(name):
    """The compiler turns products into convolutions, with dilated windows if there is a batch."""
    fn, shapes, expected = PROGRAMS[name]
    (device,) = topology_devices(parse_topology("v5e:1x1"))
    assert counted(fn, shapes, device) == expected


def test_a_loop_of_unknown_length_has_the_assumed_iterations():
    loop = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, c: c @ c, x))
    module = parse(loop.lower(jnp.ones((8, 8)), 3).compile().as_text())
    assert flops(module, 7) == 7 * 2 * 8**3
