"""Device meshes. Axis types are Auto, so that the compiler propagates shardings from our constraints."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxalign.errors import UserError

# Outer to inner: neighbours along the last axes are neighbours in the network, and tensor communicates most.
AXES = ("pipeline", "data", "fsdp", "context", "tensor")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, pipeline: int = 1, slices: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Creates a mesh of the first data*fsdp*tensor*context*pipeline devices with the axes `AXES`, including axes of size 1.

    slices: groups of devices connected by a slower network; `data` is split over them, all other axes stay within one.
    devices: by default those of this run, of which a mesh of one device uses `default_device`; for ahead-of-time compilation,
    those of a topology.

    Raises:
        UserError: there are too few devices, or slices does not divide data.
    """
    sizes = {"pipeline": pipeline, "data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    need = math.prod(sizes.values())
    if devices is None:
        devices = jax.devices() if need > 1 else [default_device()]
    have = len(devices)
    if need > have:
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        hint = f"; for a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        raise UserError(
            f"config.mesh asks for {asked} = {need} devices, but {have} {'is' if have == 1 else 'are'} available; "
            f"{_smaller(sizes, have)} would fit{hint if devices[0].platform == 'cpu' else ''}"
        )
    if data % slices:
        raise UserError(f"config.mesh.slices is {slices}; it must divide config.mesh.data ({data}), which is split over them")
    return Mesh(_arranged(list(devices)[:need], tuple(sizes.values()), slices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def default_device() -> jax.Device:
    """Returns the device of `jax.default_device`, or the first one of this process."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def _arranged(devices: list[jax.Device], shape: tuple[int, ...], slices: int) -> np.ndarray:
    """Returns the devices [pipeline, data, fsdp, context, tensor], with communicating devices close to each other."""
    pipeline, data, *inner = shape
    within = (pipeline, data // slices, *inner)
    if slices == 1 and devices[0].platform == "tpu" and len(devices) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if slices > 1 and len({getattr(device, "slice_index", 0) for device in devices}) == slices:
        return mesh_utils.create_hybrid_device_mesh(within, (1, slices, 1, 1, 1), devices, allow_split_physical_axes=True)
    # Devices without coordinates: in order, slice by slice.
    apart = np.asarray(devices).reshape(slices, *within)
    return apart.swapaxes(0, 1).reshape(shape)


def _smaller(sizes: dict[str, int], have: int) -> str:
    """Returns the nearest mesh that fits on `have` devices: its largest axes are reduced."""
    smaller = dict(sizes)
    while math.prod(smaller.values()) > have:
        largest = max(smaller, key=lambda name: smaller[name])
        below = min(smaller[largest], have + 1)  # An axis of more devices than there are cannot fit.
        smaller[largest] = max(size for size in range(1, below) if smaller[largest] % size == 0)
    return " x ".join(f"{name}={size}" for name, size in smaller.items() if size > 1) or "one device"
