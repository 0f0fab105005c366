"""Zigzag order of rows on the context axis: the chunks that each device holds, and the inverse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.parallel.sharding import make_sharding
from jaxalign.parallel.zigzag import collect, context_size, deal, holder


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_device_i_holds_chunks_i_and_2n_less_1_less_i(size):
    sharding = make_sharding(Mesh(context=size))
    assert context_size(sharding) == size and context_size(sharding.generation) == 1
    row = np.arange(6 * size, dtype=np.int32)  # chunks of 3
    chunks = row.reshape(2 * size, 3)
    dealt = jax.jit(lambda x: deal(sharding, x))(np.stack([row, row + 100]))
    for shard in dealt.addressable_shards:
        i = shard.index[1].start // 6 if shard.index[1].start else 0
        expected = np.concatenate([chunks[i], chunks[2 * size - 1 - i]])
        np.testing.assert_array_equal(shard.data, np.stack([expected, expected + 100]))
        assert holder(i, size) == holder(2 * size - 1 - i, size) == i
    np.testing.assert_array_equal(jax.jit(lambda x: collect(sharding, x))(dealt), np.stack([row, row + 100]))


def test_gradients_return_to_the_place_of_their_values_on_a_mesh_with_other_axes():
    sharding = make_sharding(Mesh(data=2, tensor=2, context=2))
    x, weight = np.random.default_rng(0).normal(size=(2, 2, 8, 3)).astype(np.float32)
    for move, back in ((deal, collect), (collect, deal)):
        found = jax.jit(jax.grad(lambda x: (move(sharding, x) * weight).sum()))(x)  # noqa: B023
        np.testing.assert_array_equal(found, back(sharding, weight))
