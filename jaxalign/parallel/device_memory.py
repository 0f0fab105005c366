"""The memory of a device, attached or described by a topology, and the bytes of arrays in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

WITHOUT_GAPS = 0.97
"""The share of the memory of JAX's allocator on a GPU that programs can use. The rest is lost to fragmentation. The share is an
assumption."""
_described: dict[str, int] = {}


def describe_memory(device_kind: str, usable: int) -> None:
    """Sets the bytes that programs can use on devices of this kind that are not attached (`jax.Device.device_kind`)."""
    _described[device_kind] = usable


def usable_memory(devices: np.ndarray) -> int | None:
    """Returns the bytes that programs can use on each of the devices, which are of one kind. That of a described device
    counts if the device does not report its own. None if unknown, as on a CPU.

    devices: of a mesh. Only those of this process know their memory.
    """
    device = next((one for one in devices.flat if one.process_index == jax.process_index()), devices.flat[0])
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # A device of a topology.
        stats = {}
    return int(stats["bytes_limit"] * WITHOUT_GAPS) if "bytes_limit" in stats else _described.get(device.device_kind)


def stored_bytes(count: int, dtype) -> int:
    """Returns the bytes of `count` numbers of a dtype; two numbers of 4 bits share a byte."""
    bits = 4 if dtype in (jnp.uint4, jnp.int4) else np.dtype(dtype).itemsize * 8
    return -(-count * bits // 8)
