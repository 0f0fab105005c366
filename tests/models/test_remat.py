"""What the backward pass stores and recomputes with `remat` and `remat_saves`."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models.adapters.lora import LoraAdapters, join, trained
from jaxalign.models.architecture import Experts
from jaxalign.models.model import Model
from jaxalign.planner import memory
from tests import tiny
from tests.adapters import adapted, frozen

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 5)).astype(np.int32)
L, B, T, D, H, K, h, F = 2, 2, 5, 16, 4, 2, 4, 24  # those of tiny.DECODER
LORA = LoraAdapters(rank=3, alpha=5.0, targets=("*",))
KINDS = {
    "all": {}, "biases": {"qkv_bias": True, "mlp_bias": True}, "norms of heads": {"head_norm": True},
    "sandwich norms": {"sandwich_norms": True}, "experts": {"experts": Experts(4, 2)},
    "adapters": {"lora": LORA}, "dora": {"lora": dataclasses.replace(LORA, dora=True)},
}
# Biases and norms add parameters to the same layers, whose gradients one model has.
TOGETHER = ("biases", "norms of heads", "sandwich norms")
GRADIENTS = {name: changes for name, changes in KINDS.items() if name not in TOGETHER} | {
    "biases and norms": {field: value for name in TOGETHER for field, value in KINDS[name].items()}
}


def made(changes: dict) -> tuple[Model, dict, dict | None]:
    """(model, trained parameters, frozen parameters or None)."""
    if "lora" in changes:
        model, params = adapted(changes["lora"])
        return model, trained(params), frozen(params)
    model = tiny.model(**changes)
    return model, model.init(jax.random.key(0)), None


def with_remat(model: Model, saves: str) -> Model:
    return dataclasses.replace(model, config=dataclasses.replace(model.config, remat=True, remat_saves=saves))


def loss_of(model: Model, fixed):
    return lambda params: jnp.sum(jnp.sin(model.hidden(join(fixed, params), TOKENS)))


@pytest.mark.medium
@pytest.mark.variants(2)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_do_not_depend_on_what_is_stored(kind):
    model, params, fixed = made(GRADIENTS[kind])
    expected = jax.jit(jax.grad(loss_of(model, fixed)))(params)
    for saves in ("nothing", "products"):
        found = jax.jit(jax.grad(loss_of(with_remat(model, saves), fixed)))(params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saves", ["nothing", "products"])
def test_a_layer_stores_its_input_and_with_products_one_array_for_each_product(kind, saves):
    """An adapter adds no array to that of its kernel. The plan counts the same bytes."""
    model, params, fixed = made(KINDS[kind])
    model = with_remat(model, saves)
    backward = jax.eval_shape(lambda params: jax.vjp(loss_of(model, fixed), params)[1], params)
    stored = collections.Counter(x.shape for x in jax.tree.leaves(backward) if x.shape[:3] == (L, B, T))
    expected = collections.Counter({(L, B, T, D): 1})
    if saves == "products":
        expected += collections.Counter({(L, B, T, H, h): 1, (L, B, T, K, h): 2, (L, B, T, D): 1})
        if kind == "experts":
            assert stored.pop((L, B, T, 4)) == 1  # The router's logits: [B, T, E]. The plan leaves them out.
        else:
            expected += collections.Counter({(L, B, T, F): 2})
        if kind in ("sandwich norms", "dora"):  # The backward pass reads the output of the MLP.
            expected += collections.Counter({(L, B, T, D): 1})
    assert stored == expected
    size = sum(4 * np.prod(shape) * count for shape, count in stored.items())
    assert memory.residuals(memory.local(model, memory.BatchShape(B, T)), saves) == size
