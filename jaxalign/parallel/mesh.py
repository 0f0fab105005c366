"""Device meshes. Axis types are Auto on purpose: the compiler propagates shardings from our constraints."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxalign.errors import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first data*fsdp*tensor devices. Raises UserError when there are fewer."""
    need, have = data * fsdp * tensor, jax.device_count()
    if need > have:
        hint = f"; for a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        raise UserError(
            f"config.mesh asks for data={data} x fsdp={fsdp} x tensor={tensor} = {need} devices, but {have} "
            f"{'is' if have == 1 else 'are'} here{hint if jax.default_backend() == 'cpu' else ''}"
        )
    devices = np.asarray(jax.devices()[:need]).reshape(data, fsdp, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
