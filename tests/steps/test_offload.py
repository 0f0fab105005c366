"""Offloading: placement of arrays, freeing of their bytes, and checkpoints."""

from __future__ import annotations

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Config, Mesh, from_config_dict
from jaxalign.errors import UserError
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.steps.offload import FrozenRole, check_host_memory, move_optimizer_state, to_device, to_host
from jaxalign.steps.state import abstract_state, init_state
from tests import tiny
from tests.steps.offloading import OPTIMIZER, kinds

MESHES = (None, (2, 2, 2))


def fresh(mesh):
    model = tiny.model(mesh)
    return model, init_state(model, OPTIMIZER, tiny.place(model, tiny.host_params()), jax.random.key(4))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_optimizer_state_moves_to_host_memory_and_back_unchanged(mesh):
    _, state = fresh(mesh)
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")
    before, where = tiny.to_host(state), jax.tree.map(lambda x: x.sharding, state)
    resting = move_optimizer_state(state, to_host)
    assert kinds(resting.opt_state) == {"pinned_host"} and kinds(resting.params) == {"device"}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moments)), "the device's buffers are not freed"
    assert jax.tree.map(lambda x: x.sharding.spec if mesh else None, resting.opt_state) == jax.tree.map(
        lambda x: x.spec if mesh else None, where.opt_state
    )
    chex.assert_trees_all_equal(tiny.to_host(resting), before)
    back = move_optimizer_state(resting, to_device)
    assert jax.tree.map(lambda x: x.sharding, back) == where
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(resting.opt_state) if leaf.ndim), "the host's are not"
    chex.assert_trees_all_equal(tiny.to_host(back), before)


@pytest.mark.parametrize(("first", "second"), [
    (None, None), *(pytest.param(*meshes, marks=pytest.mark.mesh) for meshes in (((2, 2, 2), None), (None, (2, 2, 2)))),
])
def test_checkpoints_are_independent_of_the_memory_of_the_optimizer_state(tmp_path, first, second):
    """Saved from host memory and restored into it or not, on the same or other devices. Buffers can be reused immediately."""
    (_, state), model = fresh(first), tiny.model(second)
    before = tiny.to_host(state)
    for number, offloaded in enumerate((True, False)):
        checkpointer = Checkpointer(tmp_path / str(number))
        state = move_optimizer_state(state, to_host) if offloaded else move_optimizer_state(state, to_device)
        checkpointer.save(1, state)
        state = move_optimizer_state(state, to_device) if offloaded else move_optimizer_state(state, to_host)
        checkpointer.close()
        for change, kind in ((lambda x: move_optimizer_state(x, to_host), "pinned_host"), (lambda x: x, "device")):
            checkpointer = Checkpointer(tmp_path / str(number))
            _, found = checkpointer.restore(change(abstract_state(model, OPTIMIZER)))
            checkpointer.close()
            assert kinds(found.opt_state) == {kind} and kinds(found.params) == {"device"}
            chex.assert_trees_all_equal(tiny.to_host(found), before)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_offloaded_role_is_on_the_devices_only_while_in_use(mesh):
    model = tiny.model(mesh)
    params = tiny.place(model, tiny.host_params())
    role = FrozenRole(params, offload=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    for _ in range(2):
        with role.on_device() as here:
            assert kinds(here) == {"device"}
            if mesh is not None:
                assert jax.tree.map(lambda x: x.sharding, here) == model.shardings()
            chex.assert_trees_all_equal(tiny.to_host(here), tiny.host_params())
            sums = jax.jit(lambda tree: jax.tree.map(jnp.sum, tree))(here)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(here))
        np.testing.assert_allclose(sums["embedding"], tiny.host_params()["embedding"].sum(), rtol=1e-4)


def test_without_offload_the_role_is_unchanged():
    params = tiny.place(tiny.model(), tiny.host_params())
    with FrozenRole(params).on_device() as here:
        assert all(a is b for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(params), strict=True))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_shared_weights_are_not_moved():
    base, own = {"w": jnp.ones((4, 4))}, {"a": jnp.ones((4, 2))}
    moved = to_host({**base, **own}, shared=base)
    assert moved["w"] is base["w"] and not base["w"].is_deleted()
    assert kinds(moved["a"]) == {"pinned_host"}
    with FrozenRole({**base, "a": jnp.ones((4, 2))}, True, base).on_device() as here:
        assert here["w"] is base["w"]
    assert here["a"].is_deleted() and not base["w"].is_deleted()


def test_devices_without_host_memory_are_refused():
    device = types.SimpleNamespace(platform="cpu", device_kind="toaster", addressable_memories=lambda: [
        types.SimpleNamespace(kind="device"), types.SimpleNamespace(kind="unpinned_host")])
    with pytest.raises(UserError, match=r"mesh.offload is \('optimizer',\), but toaster \(cpu\) has no memory 'pinned_host'"):
        check_host_memory(Mesh(offload=("optimizer",)), [device])
    check_host_memory(Mesh(), [device])
    check_host_memory(Mesh(offload=("optimizer", "frozen")))


@pytest.mark.parametrize(("changes", "message"), [
    ({"mesh": {"offload": ("optimizer",)}, "stages": ("pretrain", "sft")}, "between the phases of ppo and online_dpo"),
    ({"mesh": {"offload": ("frozen",)}, "lora": {"rank": 4}}, "has 'frozen', but with adapters"),
    ({"mesh": {"offload": ("params",)}}, "must be empty, or some of optimizer, frozen"),
    ({"mesh": {"offload": ("frozen", "optimizer")}}, "in this order"),
])
def test_an_offload_without_effect_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(changes)


def test_an_offload_with_an_effect_is_accepted():
    assert from_config_dict({"mesh": {"offload": ("optimizer", "frozen")}}).mesh.offload == ("optimizer", "frozen")
    assert from_config_dict({"mesh": {"offload": ["optimizer"]}, "lora": {"rank": 4}}).mesh.offload == ("optimizer",)
    assert Config().mesh.offload == ()
