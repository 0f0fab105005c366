"""The contents of a ring after inserts and changes of size, slot by slot, against numpy."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.cache import Cache, Caches
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.rollout.layouts import Layout, single
from jaxalign.rollout.ring import exchange, insert, reroll
from tests import tiny

L, K, h = 2, 2, 4
RNG = np.random.default_rng(0)


def caches(rows: int, slots: int) -> Caches:
    return (Cache(*(RNG.normal(size=shape).astype(np.float32) for shape in ((L, rows, K, h, slots), (L, rows, K, slots, h)))),)


def token(caches: Caches, row: int, slot: int) -> np.ndarray:
    """All keys and values in one slot of a row."""
    (cache,) = caches
    return np.concatenate([np.asarray(cache.keys)[:, row, :, :, slot], np.asarray(cache.values)[:, row, :, slot]], axis=-1)


@pytest.mark.parametrize("slot", [0, 3, 7])
def test_a_prompt_ends_just_before_the_next_slot_of_the_ring(slot):
    ring, prompts = caches(4, 8), caches(3, 5)
    plan = np.asarray([[[[2, 1, 5], [0, 0, 2], [-1, 0, 0]]]], np.int32)
    (found,) = insert(tiny.model(), (jax.tree.map(np.copy, ring),), prompts, plan, np.int32(slot))
    for row, source, length in plan[0, 0, :2]:
        for i in range(length):
            np.testing.assert_array_equal(token(found, row, (slot - length + i) % 8), token(prompts, source, i))
    for row in (1, 3):
        for at in range(8):
            np.testing.assert_array_equal(token(found, row, at), token(ring, row, at))


@pytest.mark.parametrize("slots", [4, 8, 13])
def test_a_change_of_size_keeps_the_latest_tokens_in_order(slots):
    ring, slot = caches(4, 8), 3
    (found,) = reroll(tiny.model(), (ring,), np.asarray([[2, 0]], np.int32), np.int32(slot), single(2, slots))
    assert found[0].values.shape == (L, 2, K, slots, h)
    for new, old in enumerate((2, 0)):
        for age in range(1, min(slots, 8) + 1):
            np.testing.assert_array_equal(token(found, new, slots - age), token(ring, old, (slot - age) % 8))


@pytest.mark.parametrize("slot", [0, 3, 4, 11])
def test_rows_keep_their_latest_tokens_when_they_change_tiers(slot):
    """A short ring of 6 slots and a long one of 12; `slot` counts through the long one."""
    before, plan = (caches(3, 6), caches(2, 12)), np.asarray([[[2, 0], [0, 1], [-1, 0]]], np.int32)
    short, long = exchange(tiny.model(), jax.tree.map(np.copy, before), plan, np.int32(slot))
    for row, other in plan[0, :2]:
        for age in range(1, 7):
            here, there = (slot - age) % 6, (slot - age) % 12
            np.testing.assert_array_equal(token(short, row, here), token(before[1], other, there))
            np.testing.assert_array_equal(token(long, other, there), token(before[0], row, here))
    for at in range(6):
        np.testing.assert_array_equal(token(short, 1, at), token(before[0], 1, at))


@pytest.mark.parametrize("slot", [0, 5, 8])
def test_two_tiers_are_merged_and_split_again(slot):
    """Rows 0 to 2 are in the short tier, 3 and 4 in the long one; entering rows are given by number."""
    before, index = (caches(3, 6), caches(2, 12)), np.asarray([[4, 1, 3]], np.int32)
    (found,) = reroll(tiny.model(), before, index, np.int32(slot), single(3, 12))
    for new, old in enumerate(index[0]):
        for age in range(1, (13 if old > 2 else 7)):
            expected = token(before[1], old - 3, (slot - age) % 12) if old > 2 else token(before[0], old, (slot - age) % 6)
            np.testing.assert_array_equal(token(found, new, 12 - age), expected)
    apart = reroll(tiny.model(), (found,), np.asarray([[1, 0, 2]], np.int32), np.int32(slot), Layout((1, 2), (6, 12)))
    for tier, rows in enumerate(((1,), (0, 2))):
        for new, old in enumerate(rows):
            for age in range(1, (6, 12)[tier] + 1):
                expected = token(found, old, (slot - age) % 12)
                np.testing.assert_array_equal(token(apart[tier], new, (6, 12)[tier] - age), expected)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the compiler in libtpu")
def test_widening_on_a_tpu_copies_no_ring():
    """All layers at once would need copies of the ring, which can take half of a device's memory."""
    sharding = make_sharding(Mesh(), topology_devices(parse_topology("v5e:1x1"), 1))
    model = Model(DecoderConfig(64, 4, 256, 8, 8, 64, 64, compute_dtype="bfloat16"), sharding=sharding)
    ring, place = model.abstract_cache(64, 384), sharding.replicated
    index = jax.ShapeDtypeStruct((1, 64), jnp.int32, sharding=place)
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    memory = reroll.lower(model, (ring,), index, slot, single(64, 768)).compile().memory_analysis()
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring)) / model.config.layers
    assert memory.temp_size_in_bytes < layer
