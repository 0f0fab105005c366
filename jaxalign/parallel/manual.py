"""`shard_map` over all of a mesh's axes, also from inside another that has some of them already."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxalign.parallel.sharding import Sharding


def on_each_device(sharding: Sharding, fn: Callable, in_specs, out_specs) -> Callable:
    """`fn` of each device's own parts. Specs name only axes that no `shard_map` around has.

    Gradients flow through it, but what is not split over an axis is then added up over it; say the derivative with `custom_vjp`
    where that costs. It is not checked which values differ by device: with check_vma the gradient of what every device reads
    whole lacks the other devices' parts (seen in jax 0.10).
    """
    around = jax.sharding.get_abstract_mesh()
    taken = set(around.manual_axes)
    if taken:
        free = set(sharding.mesh.axis_names) - taken
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)
    return jax.shard_map(fn, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
