"""Ring attention against plain attention: values, gradients, communication, and the balance of work."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxalign.config import Mesh
from jaxalign.data.packing import pack
from jaxalign.models.attention import ring as attention_ring
from jaxalign.models.attention.plain import plain_attention
from jaxalign.models.attention.ring import length_multiple, ring_attention
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.parallel.zigzag import collect, deal
from jaxalign.steps.lm_step import lm_loss
from tests import tiny

RNG = np.random.default_rng(0)
# Like Gemma 2: alternating local and global layers, capped scores of another scale, norms on both sides.
GEMMA = dataclasses.replace(
    tiny.DECODER, layers=2, window=5, local_layers=(True, False), attention_softcap=3.0, attention_scale=0.7, final_softcap=5.0,
    sandwich_norms=True, norm="rms_plus_one", scale_embeddings=True,
)
MESHES = {
    "context2": Mesh(context=2),
    "context4": Mesh(context=4),
    "data2-context2": Mesh(data=2, context=2),
    "context2-tensor2": Mesh(context=2, tensor=2),
    "fsdp2-context2-tensor2": Mesh(fsdp=2, context=2, tensor=2),
}
# Rows of 19 tokens, a prime: several documents and padding, or one document.
ROWS = pack([(RNG.integers(0, 32, n).tolist(), [1.0] * n) for n in (8, 6, 3, 19, 17, 11, 7)], 19)[0]


@functools.cache
def heads(T: int, dtype="float32"):
    """Return (q, k, v, weights of the results): 2 rows, 4 query heads, 2 key heads of width 4."""
    q, weight = RNG.normal(size=(2, 2, T, 4, 4))
    k, v = RNG.normal(size=(2, 2, T, 2, 4))
    return [jnp.asarray(x, dtype) for x in (q, k, v, weight)]


@functools.cache
def by_formula(config, T: int, packed: bool, dtype: str):
    """A function of `local`: the result and the gradients of q, k and v."""
    *qkv, weight = heads(T, dtype)

    def plain(*qkv, local):
        out = plain_attention(config, (2, T), segments(T) if packed else None)(*qkv, local)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    step = jax.jit(jax.value_and_grad(plain, (0, 1, 2), has_aux=True), compiler_options=tiny.COMPILE_FAST)
    return lambda local: step(*qkv, local=local)


@functools.cache
def segments(T: int):
    return np.sort(RNG.integers(0, 4, (2, T)), axis=1)[:, ::-1].astype(np.int32)


def both(config, mesh, T: int, packed=False, locals=(None,), dtype="float32"):
    """For each of `locals`: pairs of the result and the gradients of q, k and v, by the ring and by the formula."""
    sharding, (*qkv, weight) = make_sharding(mesh), heads(T, dtype)

    def place(x):
        return None if x is None else deal(sharding, jnp.asarray(x))

    def ring(*qkv, local):
        out = ring_attention(config, sharding, place(segments(T) if packed else None))(*(place(x) for x in qkv), local)
        out = collect(sharding, out)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    pairs, formula = [], by_formula(config, T, packed, dtype)
    step = jax.jit(jax.value_and_grad(ring, (0, 1, 2), has_aux=True), compiler_options=tiny.COMPILE_FAST)
    for local in locals:
        results = [step(*qkv, local=local), formula(local)]
        pairs += zip(*((out, *gradients) for (_, out), gradients in results), strict=True)
    return pairs


@pytest.mark.medium
@pytest.mark.parametrize("size", [2, 4, 8])
def test_results_and_gradients_equal_the_formula(size):
    """With grouped heads, packed rows, a window, a soft cap and a custom scale."""
    for found, expected in both(GEMMA, Mesh(context=size), 32, packed=True, locals=(True, False)):
        np.testing.assert_allclose(found, expected, atol=5e-6)  # sums of about 30 products of values up to 5


@pytest.mark.medium
def test_chunks_longer_than_a_block_are_processed_in_blocks(monkeypatch):
    monkeypatch.setattr(attention_ring, "BLOCK", 2)
    assert length_multiple(2, 24) == 2 * 2 * 2 and length_multiple(2, 8) == 4
    for found, expected in both(tiny.DECODER, Mesh(context=2), 24):
        np.testing.assert_allclose(found, expected, atol=5e-6)


@pytest.mark.medium
def test_bfloat16_differs_only_by_rounding():
    """Scores and sums are float32: the error is that of a few roundings by 2^-9 of results and weights, of values up to 4."""
    for found, expected in both(tiny.DECODER, Mesh(context=4), 16, dtype="bfloat16"):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=4 * 4 * 2**-9)


@functools.cache
def loss_and_gradients(mesh: Mesh | None):
    model = Model(GEMMA, sharding=make_sharding(mesh or Mesh()))
    params, rows = tiny.place(model, model_start()), ROWS
    rows = tiny.rows(model, rows)
    step = jax.jit(jax.value_and_grad(lambda p, rows: lm_loss(model, p, rows, 20.0)[0]), compiler_options=tiny.COMPILE_FAST)
    return tiny.to_host(step(params, rows))


@functools.cache
def model_start():
    return tiny.to_host(Model(GEMMA).init(jax.random.key(1)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_local_and_global_layers_have_the_same_loss_and_gradients_as_on_one_device(mesh):
    assert len(ROWS.tokens) == 4 and (ROWS.segment_ids == 0).any() and ROWS.segment_ids.max() == 3
    loss, gradients = loss_and_gradients(mesh)
    expected_loss, expected = loss_and_gradients(None)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1e-2, np.abs(wanted).max()))


def compiled(config, mesh: Mesh, T: int):
    """The compiled program of the loss and gradients of 2 rows of T tokens."""
    model = Model(config, sharding=make_sharding(mesh))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, T), x.dtype, sharding=model.sharding.batch), ROWS)
    step = jax.jit(jax.value_and_grad(lambda p, rows: lm_loss(model, p, rows, 1.0)[0]))
    return step.lower(model.abstract(), rows).compile(tiny.COMPILE_FAST)


@pytest.mark.slow
def test_keys_are_permuted_and_nothing_is_gathered():
    """No device ever holds complete keys, values, hidden states or logits."""
    text = compiled(GEMMA, Mesh(context=4), 32).as_text()
    chunks = re.findall(r"= f32\[2,2,4,2,4\]\S* collective-permute", text)  # [2, B, c, K, h]
    assert len(chunks) >= 4, "keys and values are not handed round in the forward and backward pass"
    assert "all-gather" not in text and "all-to-all" not in text
    # With the plain formula the compiler gathers keys and values.
    plain = dataclasses.replace(GEMMA, attention="plain")
    assert "all-gather" in compiled(plain, Mesh(context=4), 32).as_text()


def test_masks_are_not_hoisted_out_of_the_scan_over_layers():
    """Hoisted masks would together be [T, T]: JAX moves whatever depends only on segments and positions out of a scan over
    layers."""
    model = Model(dataclasses.replace(GEMMA, remat=True), sharding=make_sharding(Mesh(context=4)))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, 32), x.dtype), ROWS)
    program = jax.make_jaxpr(jax.grad(lambda p, rows: lm_loss(model, p, rows, 1.0)[0]))(model.abstract(), rows)
    kept = [x.aval for equation in program.eqns for x in equation.outvars if x.aval.dtype == bool]
    assert all(x.size <= 2 * 32 for x in kept), kept


def product_flops(jaxpr, times: int = 1) -> int:
    """FLOPs of all matrix products of a program, counting every iteration of a scan; inside shard_map those of one device."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * times * int(depth) * equation.outvars[0].aval.size
        assert equation.primitive.name != "cond", "work depends on the device"
        inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for sub in jaxprs_in_params(equation.params):
            total += product_flops(getattr(sub, "jaxpr", sub), inner)
    return total


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_device_does_the_same_half_of_the_work(size):
    """All keys for all queries are (2n)^2 chunk products over n devices; each device computes 2n + 1 of them."""
    T, sharding = 8 * size, make_sharding(Mesh(context=size))
    q, k = (jax.ShapeDtypeStruct((1, T, n, 4), jnp.float32) for n in (4, 2))
    attend = ring_attention(tiny.DECODER, sharding, None)
    whole = 2 * 2 * T * T * 4 * 4 // size  # two products [T, T, h] per head, divided over the devices
    forward = jax.make_jaxpr(lambda *qkv: attend(*qkv, None))(q, k, k)
    assert product_flops(forward.jaxpr) / whole == pytest.approx((2 * size + 1) / (4 * size))

    def loss(*qkv):
        return attend(*qkv, None).sum()

    backward = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k)
    # Two products forward, and five backward because scores are recomputed.
    assert product_flops(backward.jaxpr) / whole == pytest.approx((2 * size + 1) / (4 * size) * 7 / 2)


def test_the_compiled_program_of_a_device_does_no_more_than_that_work():
    """By the compiler's own count, which adds the softmax to the products. With 2 devices no loop hides work from the count."""
    T, sharding = 256, make_sharding(Mesh(context=2))
    q, k = (jax.ShapeDtypeStruct((1, T, n, 64), jnp.float32) for n in (4, 2))
    attend = ring_attention(tiny.DECODER, sharding, None)
    cost = jax.jit(lambda *qkv: attend(*qkv, None)).lower(q, k, k).compile().cost_analysis()
    products = 2 * 2 * T * T * 64 * 4 * 5 / 16
    assert products <= cost["flops"] < 1.1 * products
