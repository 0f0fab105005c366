"""Quantised bases: errors of weights and logits, memory, and training of adapters."""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models.adapters.lora import LINEAR, LoraAdapters, dense, is_quantised, join, merge, trained
from jaxalign.models.adapters.quantised import quantise, quantise_abstract
from jaxalign.models.architecture import Experts
from jaxalign.models.model import Model
from tests import tiny
from tests.adapters import TOKENS, adapted, frozen

LORA = LoraAdapters(3, 5.0, ("*",))
# The NormalFloat table printed in the QLoRA paper (appendix E), to four digits.
NF4 = np.array([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
                0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0], np.float32)
WIDE = dict(layers=2, embed=128, mlp=192, heads=2, kv_heads=2, head_dim=64)


def kernels(params):
    for part, name in LINEAR:
        yield (part, name), params["blocks"][part][name]


def stored_bytes(params) -> int:
    """Bytes of a parameter tree on devices, with two four-bit numbers per byte."""
    leaves = [(leaf.size, np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(params)]
    return sum(math.ceil(size / 2) if dtype in (jnp.uint4, jnp.int4) else size * dtype.itemsize for size, dtype in leaves)


@functools.cache
def wide():
    model = tiny.model(**WIDE)
    return model, tiny.to_host(model.init(jax.random.key(0)))


@pytest.mark.medium
def test_int8_errors_are_at_most_half_a_step_of_the_largest_weight_of_an_output():
    model, host = wide()
    found = quantise(tiny.place(model, host), "int8")
    for (part, name), kernel in kernels(found):
        original, count = host["blocks"][part][name], LINEAR[part, name][0]
        step = np.abs(original).max(axis=tuple(range(1, 1 + count)), keepdims=True) / 127.5  # from -127.5 to 127.5
        back = np.asarray(dense(kernel, jnp.float32))
        assert np.all(np.abs(back - original) <= step * 0.5001)
        assert kernel.qvalue.dtype == np.int8


def test_nf4_rounds_to_the_nearest_of_sixteen_numbers_in_each_block_of_64():
    model, host = wide()
    found = quantise(tiny.place(model, host), "nf4")
    for (part, name), kernel in kernels(found):
        axis = LINEAR[part, name][0]  # the last input axis
        blocks = np.moveaxis(host["blocks"][part][name], axis, -1)
        blocks = blocks.reshape(*blocks.shape[:-1], -1, 64)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        scaled = blocks / largest
        nearest = np.abs(scaled[..., None] - NF4).min(axis=-1)
        back = np.moveaxis(np.asarray(dense(kernel, jnp.float32)), axis, -1).reshape(blocks.shape)
        assert np.all(np.abs(back / largest - scaled) <= nearest + 2e-4)  # four digits of the table, and ties


@pytest.mark.parametrize(("kind", "bits", "scales"), [("bfloat16", 16, 0), ("int8", 8, 1 / 64), ("nf4", 4, 1 / 64)])
def test_the_stored_bytes_are_those_of_the_format(kind, bits, scales):
    """The compiler's size of the arguments equals that of the stored bits: 4 bits per number for nf4."""
    model, host = wide()
    found = quantise(tiny.place(model, host), kind)
    weights = sum(host["blocks"][part][name].size for part, name in LINEAR)
    small = sum(leaf.size for leaf in jax.tree.leaves(host)) - weights - host["embedding"].size
    least = weights * bits // 8 + 2 * host["embedding"].size + 4 * small
    assert least <= stored_bytes(found) <= least + 4 * weights * scales
    program = jax.jit(lambda p: [leaf.ravel()[0] for leaf in jax.tree.leaves(p)]).lower(found).compile()
    assert program.memory_analysis().argument_size_in_bytes == pytest.approx(stored_bytes(found), rel=0.02)


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradients(model: Model, own, base):
    """Compute the logits, and the gradients of their mean square for the adapters."""
    def loss(own):
        logits = model.logits(join(base, own), model.hidden(join(base, own), TOKENS))
        return jnp.mean(jnp.square(logits)), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(own)
    return logits, gradients


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize(("kind", "distance"), [("bfloat16", 0.01), ("int8", 0.03), ("nf4", 0.4)])
def test_logits_are_close_to_those_of_the_full_base_and_adapters_can_be_trained(kind, distance):
    """The distance is the root mean square relative to the size of the logits. Errors of a weight are about 0.1% (bfloat16),
    0.6% (int8) and 9% (nf4); those of the 14 kernels add up like independent errors: times 3.7."""
    model, params = adapted(LORA)
    base = quantise(tiny.place(model.base, frozen(params)), kind)
    own = trained(params)
    full, _ = logits_and_gradients(model, own, frozen(params))
    found, gradients = logits_and_gradients(model, own, base)
    full, found = np.asarray(full), np.asarray(found)
    assert 0 < np.sqrt(np.mean((found - full) ** 2) / np.mean(full**2)) < distance
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradients))
    # The model with the same numbers in float32 is exactly equal, in its gradients as well.
    same = jax.tree.map(lambda x: dense(x, jnp.float32), base, is_leaf=is_quantised)
    expected, expected_gradients = logits_and_gradients(model, own, same)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    chex.assert_trees_all_close(tiny.to_host(gradients), tiny.to_host(expected_gradients), rtol=1e-4, atol=1e-5)
    merged = merge(LORA, join(base, own))
    assert not any(is_quantised(kernel) for _, kernel in kernels(merged))


def test_dora_and_a_mesh():
    """Scales are sharded like their kernels if there are enough of them; the values equal those on one device."""
    lora, outputs = dataclasses.replace(LORA, dora=True), {}
    for mesh in (None, (2, 2, 2)):
        model, params = adapted(lora, mesh)
        base = quantise(tiny.place(model.base, frozen(params)), "int8")
        outputs[mesh] = np.asarray(jax.jit(model.hidden)(join(base, tiny.place(model, trained(params))), TOKENS))
    np.testing.assert_allclose(outputs[2, 2, 2], outputs[None], rtol=2e-5, atol=2e-5)
    query, expected = base["blocks"]["attention"]["query"], model.base.shardings()["blocks"]["attention"]["query"]
    assert query.qvalue.sharding.is_equivalent_to(expected, 4)
    assert query.scale.shape == (2, 1, 4, 4) and query.scale.sharding.spec[2] == expected.spec[2]


@pytest.mark.medium
def test_experts_are_quantised_and_the_router_is_not():
    model = tiny.model(experts=Experts(4, 2))
    host = tiny.to_host(model.init(jax.random.key(0)))
    base = quantise(tiny.place(model, host), "int8")
    mlp = base["blocks"]["mlp"]
    assert {name: is_quantised(leaf) for name, leaf in mlp.items()} == {"gate": True, "up": True, "down": True, "router": False}
    assert mlp["gate"].scale.shape == (2, 4, 1, 24) and mlp["down"].scale.shape == (2, 4, 1, 16)
    full, found = (np.asarray(jax.jit(model.hidden)(params, TOKENS)) for params in (host, base))
    assert np.sqrt(np.mean((found - full) ** 2) / np.mean(full**2)) < 0.1


@pytest.mark.slow
def test_the_backward_pass_dequantises_one_layer_at_a_time():
    """By the compiler's count, four times the layers add less memory than one layer of float32 kernels."""
    temporary = {}
    for layers in (2, 8):
        model = dataclasses.replace(tiny.model(**WIDE | {"layers": layers}), lora=LORA)
        base = quantise_abstract(model.base.abstract(), "int8")
        gradient = jax.grad(lambda own, base: jnp.sum(model.hidden(join(base, own), TOKENS[:1, :4])))  # noqa: B023
        temporary[layers] = jax.jit(gradient).lower(model.abstract(), base).compile().memory_analysis().temp_size_in_bytes
    layer = sum(int(np.prod(kernel.shape[1:])) * 4 for _, kernel in kernels(base))
    assert temporary[8] - temporary[2] < layer
