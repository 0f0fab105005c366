"""Training state: sharding, restoring, and non-finite steps."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Optimizer
from jaxalign.rl.state import abstract_ppo_state
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import abstract_state, apply_gradients, init_state
from tests import tiny

OPTIMIZER = make_optimizer(Optimizer(weight_decay=0.1), 10)


def fresh(mesh=None, head="lm"):
    model = tiny.model(mesh, head)
    return model, init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params(head)), jax.random.key(4))


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_the_abstract_state_has_the_shapes_and_shardings_of_the_state(mesh):
    model, state = fresh(mesh)
    described = abstract_state(model, OPTIMIZER)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, described)
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, described)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_every_matrix_and_its_moments_are_split_in_four(head):
    """On a mesh of 2 x 2 x 2, fsdp and tensor each halve every matrix, and data holds copies. Vectors are replicated."""
    _, state = fresh((2, 2, 2), head)
    moments = [optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu")]
    for tree in (state.params, *moments):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            parts = 1 if "norm" in name or "score" in name else 4
            shards = leaf.addressable_shards
            assert len(shards) == 8, name
            assert {shard.data.size * parts for shard in shards} == {leaf.size}, name
            assert len({str(shard.index) for shard in shards}) == parts, name
    assert len(jax.tree.leaves(state.params)) == {"lm": 11, "scalar": 12}[head]


def test_pitfall_15_all_roles_of_ppo_are_sharded():
    """Other systems replicated the reference and the reward model although the policy was sharded."""
    setup = tiny.setup((2, 2, 2))
    state, frozen = tiny.state(setup), tiny.roles(setup)
    for tree in (state.policy.params, state.critic.params, frozen.reference, frozen.preference):
        for leaf in (tree["embedding"], tree["blocks"]["mlp"]["up"], tree["blocks"]["attention"]["out"]):
            assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    described = abstract_ppo_state(setup)
    assert jax.tree.map(lambda x: x.sharding, described) == jax.tree.map(lambda x: x.sharding, state)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    model, state = fresh()
    before = tiny.to_host(state)
    gradients = jax.tree.map(jnp.ones_like, state.params)
    gradients["final_norm"]["scale"] = gradients["final_norm"]["scale"].at[3].set(jnp.nan)
    new, metrics = jax.jit(apply_gradients, static_argnums=(0, 3))(model, state, gradients, OPTIMIZER, jnp.float32(1))
    chex.assert_trees_all_equal(tiny.to_host(new.params), before.params)
    chex.assert_trees_all_equal(tiny.to_host(new.opt_state), before.opt_state)
    assert int(new.step) == 1 and float(metrics.skipped) == 1
    ones = jax.tree.map(jnp.ones_like, state.params)
    new, metrics = jax.jit(apply_gradients, static_argnums=(0, 3))(model, state, ones, OPTIMIZER, jnp.float32(1))
    assert float(metrics.skipped) == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(ones))
    assert float(metrics.grad_norm) == pytest.approx(np.sqrt(count), rel=1e-5)
    assert (tiny.to_host(new.params)["embedding"] != before.params["embedding"]).all()


def test_a_state_that_is_donated_leaves_the_callers_key():
    model, key = tiny.model(), jax.random.key(4)
    state = init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), key)
    jax.jit(lambda state: jax.tree.map(lambda x: x + x, state), donate_argnums=0)(state)
    assert state.key.is_deleted() and jax.random.uniform(key) < 1
