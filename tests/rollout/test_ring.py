"""What enters a ring and what stays when it changes its size, slot by slot, against numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxalign.models.cache import Cache, Caches
from jaxalign.rollout.ring import insert, reroll
from tests import tiny

L, K, h = 2, 2, 4
RNG = np.random.default_rng(0)


def caches(rows: int, slots: int) -> Caches:
    return (Cache(*(RNG.normal(size=shape).astype(np.float32) for shape in ((L, rows, K, h, slots), (L, rows, K, slots, h)))),)


def token(caches: Caches, row: int, slot: int) -> np.ndarray:
    """All that a slot holds of a row."""
    (cache,) = caches
    return np.concatenate([np.asarray(cache.keys)[:, row, :, :, slot], np.asarray(cache.values)[:, row, :, slot]], axis=-1)


@pytest.mark.parametrize("slot", [0, 3, 7])
def test_a_prompt_ends_where_the_ring_goes_on(slot):
    ring, prompts = caches(4, 8), caches(3, 5)
    plan = np.asarray([[[2, 1, 5], [0, 0, 2], [-1, 0, 0]]], np.int32)
    found = insert(tiny.model(), jax.tree.map(np.copy, ring), prompts, plan, np.int32(slot))
    for row, source, length in plan[0, :2]:
        for i in range(length):
            np.testing.assert_array_equal(token(found, row, (slot - length + i) % 8), token(prompts, source, i))
    for row in (1, 3):
        for at in range(8):
            np.testing.assert_array_equal(token(found, row, at), token(ring, row, at))


@pytest.mark.parametrize("slots", [4, 8, 13])
def test_another_size_keeps_the_latest_tokens_in_their_order(slots):
    ring, slot = caches(4, 8), 3
    found = reroll(tiny.model(), ring, np.asarray([[2, 0]], np.int32), np.int32(slot), slots)
    assert found[0].values.shape == (L, 2, K, slots, h)
    for new, old in enumerate((2, 0)):
        for age in range(1, min(slots, 8) + 1):
            np.testing.assert_array_equal(token(found, new, slots - age), token(ring, old, (slot - age) % 8))
