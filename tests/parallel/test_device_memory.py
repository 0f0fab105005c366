"""The memory of attached and of described devices."""

from __future__ import annotations

import types

import jax
import pytest

from jaxalign.parallel import device_memory as module
from jaxalign.parallel.device_memory import describe_memory, device_memory


def test_the_limit_of_an_attached_device_counts_and_that_of_a_described_one_only_without_it(monkeypatch):
    monkeypatch.setattr(module, "_described", {})
    attached = types.SimpleNamespace(device_kind="NVIDIA H100", memory_stats=lambda: {"bytes_limit": 7, "bytes_in_use": 3})
    absent = types.SimpleNamespace(device_kind="NVIDIA H100", memory_stats=lambda: None)
    assert device_memory(absent) is None
    describe_memory("NVIDIA H100", 5)
    assert (device_memory(attached), device_memory(absent)) == (7, 5)


@pytest.mark.cpu
def test_the_memory_of_a_cpu_is_unknown():
    assert device_memory(jax.devices()[0]) is None
