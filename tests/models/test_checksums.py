"""Checksums of arrays: equal on every mesh, and changed by every change of one element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.models.checkpoints import checksums as module
from jaxalign.models.checkpoints.checksums import checksums, damaged_arrays
from jaxalign.parallel.mesh import make_mesh

DTYPES = [np.float32, jnp.bfloat16, np.float16, np.int8, np.int32, np.uint32, np.bool_]


def values(dtype, seed=0):
    return np.random.default_rng(seed).integers(-100, 100, (8, 6, 4)).astype(dtype)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_do_not_depend_on_the_mesh(dtype, on_host, monkeypatch):
    monkeypatch.setattr(module, "_HOST_BYTES", 1 << 20 if on_host else 0)
    mesh, x = make_mesh(data=2, tensor=4), values(dtype)
    expected = checksums({"x": x})
    for spec in (PartitionSpec(), PartitionSpec("data"), PartitionSpec("tensor", "data")):
        assert checksums({"x": jax.device_put(x, NamedSharding(mesh, spec))}) == expected


def test_host_and_device_compute_the_same(monkeypatch):
    """Numbers of 64 bits, arrays without axes or elements, transposed arrays, and more axes than strides."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        tree = {
            "double": jnp.asarray(rng.normal(size=(3, 4))), "long": jnp.asarray(-7, jnp.int64), "scalar": jnp.float32(0.3),
            "empty": jnp.zeros((0, 3)), "turned": jnp.asarray(rng.normal(size=(4, 3)).T, jnp.float32), "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(3)), "axes": jnp.asarray(rng.integers(0, 99, (2, 1, 2, 1, 2, 3, 2))),
            "true": jnp.asarray(True), "nibbles": jnp.asarray(rng.integers(0, 16, (3, 5)), jnp.uint4),
        }
        found = checksums(tree)
        monkeypatch.setattr(module, "_HOST_BYTES", -1)
        assert checksums(tree) == found


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_one_changed_bit_anywhere_changes_them(dtype):
    rng, x = np.random.default_rng(1), values(dtype)
    expected = checksums({"x": x})
    for _ in range(50):
        changed = x.copy()
        changed.view(np.uint8).reshape(-1)[rng.integers(x.nbytes)] ^= 1 << rng.integers(8)
        assert checksums({"x": changed}) != expected


def test_exchanged_elements_arrays_and_names_change_them():
    x = values(np.float32)
    tree = {"a": x, "b": x[::-1], "c": jax.random.key(3)}
    stored = checksums(tree)
    assert len(set(stored.values())) == 3 and damaged_arrays(tree, stored) == []
    assert damaged_arrays(tree | {"a": x[::-1], "b": x}, stored) == ["a", "b"]
    assert damaged_arrays({"a": x, "c": jax.random.key(4)}, stored) == ["b", "c"]
    assert damaged_arrays(tree, None) == damaged_arrays(tree, {"z": 1})[:3] == ["a", "b", "c"]
