"""The 8-bit cache: its numbers against numpy, and attention over them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models.attention.plain import attend
from jaxalign.models.cache import Cache, attend_cache, cache_shapes, quantise, stored
from tests import tiny

CONFIG = dataclasses.replace(tiny.DECODER, cache_dtype="int8")
RNG = np.random.default_rng(0)


def vectors(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_each_vector_is_scaled_by_its_largest_number():
    x = vectors(3, 5, 2, 4)
    x[0, 0, 0] = 0
    numbers, scale = (np.asarray(y) for y in quantise(x))
    largest = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(scale, largest / np.float32(127), rtol=1e-6)
    steps = x / np.where(scale == 0, np.float32(1), scale)[..., None]
    np.testing.assert_array_equal(numbers, np.round(steps).astype(np.int8))
    assert np.abs(numbers * scale[..., None] - x).max() <= scale.max() / 2 * (1 + 1e-5)
    assert numbers.dtype == np.int8 and scale.dtype == np.float32


@pytest.mark.medium
def test_attention_over_8_bits_equals_attention_over_the_dequantised_values():
    B, S, H, K, h = 2, 7, 4, 2, 4
    q, k, v = vectors(B, 1, H, h), vectors(B, S, K, h), vectors(B, S, K, h)
    mask = np.arange(S)[None] < np.asarray([[7], [3]])
    layer = stored(CONFIG, jnp.asarray(k), jnp.asarray(v))
    found = attend_cache(jnp.asarray(q), layer, mask)
    k, v = (np.asarray(numbers, np.float32) * np.asarray(scale)[..., None] for numbers, scale in (quantise(k), quantise(v)))
    np.testing.assert_allclose(found, attend(q, k, v, mask[:, None]), atol=1e-6)


@pytest.mark.parametrize(("dtype", "itemsize"), [("compute", 4), ("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_the_bytes_of_a_cache(dtype, itemsize):
    shapes = cache_shapes(dataclasses.replace(tiny.DECODER, cache_dtype=dtype), rows=3, slots=5)
    numbers = 2 * 2 * 3 * 2 * 5
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) == numbers * (4 * itemsize + 4 * (dtype == "int8"))
    assert isinstance(shapes, Cache)
