"""The memory of attached and of described devices, and the bytes of arrays."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.parallel import device_memory as module
from jaxalign.parallel.device_memory import describe_memory, stored_bytes, usable_memory


def device(memory_stats, process: int = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(device_kind="NVIDIA H100", process_index=process, memory_stats=memory_stats)


def not_addressable():
    raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices")


def test_the_memory_of_an_attached_device_counts_without_gaps_and_that_of_a_described_one_only_without_it(monkeypatch):
    monkeypatch.setattr(module, "_described", {})
    attached, absent = device(lambda: {"bytes_limit": 1000, "bytes_in_use": 3}), device(not_addressable)
    assert usable_memory(np.array([absent])) is None
    describe_memory("NVIDIA H100", 500)
    assert (usable_memory(np.array([attached])), usable_memory(np.array([absent]))) == (970, 500)


def test_a_process_asks_one_of_its_own_devices(monkeypatch):
    monkeypatch.setattr(module, "_described", {})
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    devices = [[device(not_addressable)], [device(lambda: {"bytes_limit": 1000}, process=1)]]
    assert usable_memory(np.array(devices)) == 970


@pytest.mark.cpu
def test_the_memory_of_a_cpu_is_unknown():
    assert usable_memory(np.array(jax.devices())) is None


@pytest.mark.parametrize(("dtype", "size"), [(jnp.uint4, 3), (jnp.int8, 5), (jnp.bfloat16, 10), (np.float32, 20)])
def test_bytes_of_five_numbers(dtype, size):
    assert stored_bytes(5, dtype) == size
