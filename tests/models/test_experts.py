"""The mixture of experts: every token gets all its experts, on one device or with the experts split over a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.models.architecture import Experts
from jaxalign.models.experts import Load, load_balance
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from tests import tiny

CHANGES = {"experts": Experts(4, 2), "window": 4, "local_layers": (True, False)}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 12)).astype(np.int32)


def _loss(model, params):
    hidden, balance = model.hidden_and_balance(params, TOKENS)
    return jnp.einsum("btd,d->", jnp.sin(hidden), jnp.arange(16.0)) + balance


@pytest.mark.variants(1)
@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 2, 2, 2)])
def test_experts_split_over_a_mesh_have_the_same_outputs_and_gradients(mesh):
    alone, split = tiny.model(**CHANGES), tiny.model(mesh, **CHANGES)
    params = alone.init(jax.random.key(0))
    expected, wanted = jax.jit(jax.value_and_grad(lambda p: _loss(alone, p)))(params)
    placed = tiny.place(split, jax.tree.map(np.asarray, params))
    assert placed["blocks"]["mlp"]["gate"].addressable_shards[0].data.shape[1] == 4 // mesh[2]
    found, gradients = jax.jit(jax.value_and_grad(lambda p: _loss(split, p)))(placed)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.medium
def test_no_token_is_dropped_if_all_choose_the_same_expert():
    """With a capacity most tokens would be dropped: here the output is that of the one expert, token by token."""
    model = tiny.model(experts=Experts(4, 1), layers=1)
    params = model.init(jax.random.key(0))
    params["blocks"]["mlp"]["router"] = jnp.zeros((1, 16, 4))
    dense = tiny.model(layers=1)
    mlp = {name: params["blocks"]["mlp"][name][:, 0] for name in ("gate", "up", "down")}
    plain = params | {"blocks": params["blocks"] | {"mlp": mlp}}
    # With equal scores every token chooses the first expert.
    np.testing.assert_allclose(model.hidden(params, TOKENS), dense.hidden(plain, TOKENS), atol=1e-5)


def test_the_load_balance_by_hand():
    """Two experts, three tokens, one choice each: shares (2/3, 1/3), mean probabilities (.6, .4): 2 * (.4 + .1333)."""
    load = Load(jnp.array([2.0, 1.0]), jnp.array([1.8, 1.2]), jnp.float32(3))
    assert float(load_balance(load)) == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4))


def test_replicated_experts_sample_the_same():
    """With the sampling rules "whole", rows are split over all devices and experts over none."""
    alone = tiny.model(**CHANGES)
    params = alone.init(jax.random.key(0))
    split = Model(alone.config, sharding=make_sharding(Mesh(fsdp=2, tensor=2, generation="whole")))
    placed = split.for_generation(tiny.place(split, jax.tree.map(np.asarray, params)))
    found, _ = jax.jit(split.generation.prefill)(placed, TOKENS)
    np.testing.assert_allclose(found, jax.jit(alone.hidden)(params, TOKENS), atol=1e-5)
