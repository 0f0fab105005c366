"""The memory of a device, attached or described by a topology."""

from __future__ import annotations

import jax

_described: dict[str, int] = {}


def describe_memory(device_kind: str, usable: int) -> None:
    """Sets the bytes that programs may use on devices of this kind that are not attached (`jax.Device.device_kind`)."""
    _described[device_kind] = usable


def device_memory(device: jax.Device) -> int | None:
    """Returns the bytes that programs may use on the device; None if unknown, as on a CPU."""
    try:
        stats = device.memory_stats()
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # A device of a topology.
        stats = None
    return (stats or {}).get("bytes_limit", _described.get(device.device_kind))
