"""`shard_map` over all axes of a mesh, also inside another `shard_map` over some of them."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxalign.parallel.sharding import Sharding


def on_each_device(sharding: Sharding, fn: Callable, in_specs, out_specs) -> Callable:
    """Applies `fn` to each device's own parts. The specs must not name axes of an enclosing `shard_map`.

    Gradients flow through it, but the gradient of an input that is not split over an axis is summed over that axis; where this
    is expensive, define the derivative with `custom_vjp`. check_vma is off: with it the gradient of a replicated input lacks
    the other devices' contributions (seen in jax 0.10).
    """
    around = jax.sharding.get_abstract_mesh()
    taken = set(around.manual_axes)
    if taken:
        free = set(sharding.mesh.axis_names) - taken
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)
    return jax.shard_map(fn, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
