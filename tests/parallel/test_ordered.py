"""`after` changes no value, whatever it waits for, and does nothing without a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.parallel.ordered import after
from tests import tiny

TREE = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "mask": np.array([True, False]),
        "score": np.array([-1.5, np.nan], np.float32)}


@pytest.mark.parametrize("first", [0.0, -3.0, np.nan, np.inf, -np.inf, np.int32(7), np.array([True]), np.zeros((0,))])
def test_the_value_that_is_waited_for_changes_nothing(first):
    sharding = tiny.model(mesh=(2, 2, 2)).sharding
    found = jax.jit(lambda tree, first: after(sharding, tree, {"first": first}))(TREE, jnp.asarray(first))
    for name, expected in TREE.items():
        assert found[name].dtype == jnp.asarray(expected).dtype
        np.testing.assert_array_equal(found[name], expected)


def test_on_one_device_nothing_is_done():
    assert after(tiny.model().sharding, TREE, 1.0) is TREE


def test_gradients_pass_only_through_the_tree():
    sharding = tiny.model(mesh=(2, 2, 2)).sharding
    found = jax.grad(lambda x, y: jnp.sum(after(sharding, x, y**2) ** 2), argnums=(0, 1))(jnp.array([1.0, 2.0]), jnp.array(3.0))
    np.testing.assert_array_equal(found[0], [2.0, 4.0])
    assert found[1] == 0
