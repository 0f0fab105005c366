"""Fused kernels against the plain formula, interpreted on the CPU and compiled ahead of time for a TPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Mesh
from jaxalign.models.attention.fused import cudnn_attention, splash_attention
from jaxalign.models.attention.plain import plain_attention
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding, one_device
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.records import PackedBatch
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.state import abstract_state
from tests import tiny

RNG = np.random.default_rng(0)
T = 150  # two blocks of 128, the second mostly padding
SEGMENTS = np.sort(RNG.integers(0, 4, (2, T)), axis=1)[:, ::-1].astype(np.int32)
CASES = {
    "causal": ({}, None, False),
    "packed": ({}, None, True),
    "window": ({"window": 20}, None, False),
    "window-packed": ({"window": 20}, None, True),
    "scale-and-cap": ({"attention_scale": 0.7, "attention_softcap": 3.0}, None, True),
    "local-and-global": ({"window": 20, "local_layers": (True, False)}, (True, False), True),
    "one-key-head": ({"kv_heads": 1}, None, True),
}


def compare(config, attend, segments, locals, atol: float, dtype="float32") -> None:
    """Compare results and gradients of `attend` with the formula in float32, to `atol` of the largest value."""
    q, weight = RNG.normal(size=(2, 2, T, 4, 8)).astype(np.float32)
    k, v = RNG.normal(size=(2, 2, T, config.kv_heads, 8)).astype(np.float32)
    plain = plain_attention(config, (2, T), segments)

    def step(attend, dtype):
        def loss(q, k, v, local):
            out = attend(q, k, v, local).astype(jnp.float32)
            return jnp.sum(out * weight), out

        made = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), compiler_options=tiny.COMPILE_FAST)
        return lambda local: made(*(jnp.asarray(x, dtype) for x in (q, k, v)), local)

    found, expected = step(attend, dtype), step(plain, "float32")
    for local in locals or (None,):
        (_, out), gradients = found(local)
        (_, wanted), wanted_gradients = expected(local)
        for have, want in zip((out, *gradients), (wanted, *wanted_gradients), strict=True):
            np.testing.assert_allclose(have.astype(np.float32), want, atol=atol * np.abs(want).max())


@pytest.mark.medium
@pytest.mark.variants(2)
@pytest.mark.parametrize(("changes", "locals", "packed"), CASES.values(), ids=CASES)
def test_splash_attention_equals_the_formula(changes, locals, packed):
    config, segments = dataclasses.replace(tiny.DECODER, **changes), jnp.asarray(SEGMENTS) if packed else None
    attend = splash_attention(config, one_device(), segments, interpret=True)
    compare(config, attend, segments, locals, 1e-5)  # sums of 150 products in float32


def test_splash_attention_in_bfloat16_differs_only_by_rounding():
    """Inputs, scaled queries and results are rounded to a relative 2^-9; some of these errors add up in a gradient."""
    attend = splash_attention(tiny.DECODER, one_device(), jnp.asarray(SEGMENTS), interpret=True)
    compare(tiny.DECODER, attend, SEGMENTS, None, 8 * 2**-9, "bfloat16")


@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=2, tensor=2)], ids=["data-tensor", "fsdp-tensor"])
def test_splash_attention_runs_on_the_rows_and_heads_of_each_device(mesh):
    attend = splash_attention(tiny.DECODER, make_sharding(mesh), jnp.asarray(SEGMENTS), interpret=True)
    compare(tiny.DECODER, attend, SEGMENTS, None, 1e-5)


@pytest.mark.parametrize(("changes", "locals", "packed"), [case for name, case in CASES.items() if name != "scale-and-cap"],
                         ids=[name for name in CASES if name != "scale-and-cap"])
def test_the_call_of_cudnn_computes_the_formula(changes, locals, packed):
    """XLA computes the same call, because there is no GPU here."""
    config, segments = dataclasses.replace(tiny.DECODER, **changes), jnp.asarray(SEGMENTS) if packed else None
    compare(config, cudnn_attention(config, segments, "xla"), segments, locals, 1e-5)


@functools.cache
def tpu():
    """Four devices of a v5e, which exist only for the compiler. Skips if the compiler, libtpu, is absent."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is absent: pip install libtpu")
    return topology_devices(parse_topology("v5e:2x2"))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "length", "changes"), [
    (128, 1024, {}),
    (64, 1000, {"window": 100}),
    (80, 640, {}),
    (256, 512, {"window": 300, "attention_softcap": 50.0, "local_layers": (True, False)}),
])
def test_splash_attention_compiles_for_a_tpu_forward_and_backward(head_dim, length, changes):
    sharding = make_sharding(Mesh(data=2, tensor=2), tpu())
    config = dataclasses.replace(tiny.DECODER, head_dim=head_dim, compute_dtype="bfloat16", **changes)

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding.named(axes))

    q = array((4, length, 4, head_dim), "bfloat16", "batch", None, "heads", None)
    k = array((4, length, 2, head_dim), "bfloat16", "batch", None, "kv_heads", None)
    segments = array((4, length), "int32", "batch", None)
    local = array((), "bool") if config.mixed_layers else None

    def loss(q, k, v, segments, local):
        return jnp.sum(splash_attention(config, sharding, segments)(q, k, v, local).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, segments, local).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3 * (2 if config.mixed_layers else 1)  # forward, dq, dk and dv
    assert "all-gather" not in text and "all-reduce" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=2, tensor=2)], ids=["one", "fsdp-tensor"])
def test_a_training_step_compiles_for_a_tpu_with_the_kernel_in_it(mesh):
    sharding = make_sharding(mesh, tpu())
    config = dataclasses.replace(tiny.DECODER, head_dim=64, compute_dtype="bfloat16", remat=True)
    text = {}
    for attention in ("auto", "plain"):
        model = Model(dataclasses.replace(config, attention=attention), sharding=sharding)
        batch = PackedBatch(*(
            jax.ShapeDtypeStruct((4, 256), jnp.dtype(dtype), sharding=sharding.batch)
            for dtype in ("int32", "int32", "int32", "float32")
        ))
        optimizer = optax.sgd(0.1)
        lowered = lm_step.lower(abstract_state(model, optimizer), LmArguments(model=model, optimizer=optimizer, batch=batch))
        text[attention] = lowered.compile().as_text()
    # The kernel runs forward, forward again for the backward pass because of rematerialisation, for dq, and for dk with dv.
    assert text["auto"].count('custom_call_target="tpu_custom_call"') == 4
    assert "tpu_custom_call" not in text["plain"]
    assert not any("256,256]" in program for program in text.values())  # Scores of all queries and keys.
