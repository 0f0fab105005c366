"""The layout of rows over the mesh axis `context`: 2n chunks per row for n devices; device i holds chunks i and 2n-1-i.

Every device has as many early as late tokens, and therefore the same work in causal attention. If rows were split in
their original order, the last device would have 2n-1 times the work of the first. A row is rearranged once before a model and
restored once after it.

Source: the load-balanced ring of Striped Attention (arXiv 2311.09431) in the two-chunk form that Llama 3 trained with
(arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.sharding import Sharding

CONTEXT = "context"


def context_size(sharding: Sharding) -> int:
    """Returns the number of devices over which the rules split a row."""
    split = sharding.spec(("length",))[0]
    return sharding.mesh.shape[CONTEXT] if split and CONTEXT in split else 1


def holder(chunk: int, size: int) -> int:
    """Returns which of `size` devices holds a chunk."""
    return min(chunk, 2 * size - 1 - chunk)


def deal(sharding: Sharding, x: jax.Array) -> jax.Array:
    """Rearranges x [B, T, ...] from row order to the layout on the devices. T is a multiple of twice the number of devices."""
    return _moved(sharding, True, x)


def collect(sharding: Sharding, x: jax.Array) -> jax.Array:
    """The inverse of `deal`."""
    return _moved(sharding, False, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(sharding: Sharding, out: bool, x: jax.Array) -> jax.Array:
    """Moves half of a device's data at a time: its even chunk, then its odd one. Each device has one of each in both
    layouts."""
    size = context_size(sharding)
    routes = [[(n // 2, holder(n, size)) for n in range(parity, 2 * size, 2)] for parity in (0, 1)]
    if not out:
        routes = [[(there, here) for here, there in route] for route in routes]

    def local(x):
        swapped = jax.lax.axis_index(CONTEXT) % 2 == 1

        def turn(a, b):
            return jnp.where(swapped, b, a), jnp.where(swapped, a, b)

        even_odd = jnp.split(x, 2, axis=1)
        even_odd = even_odd if out else turn(*even_odd)
        moved = [jax.lax.ppermute(half, CONTEXT, route) for half, route in zip(even_odd, routes, strict=True)]
        return jnp.concatenate(turn(*moved) if out else moved, axis=1)

    spec = sharding.spec(("batch", "length"))
    return on_each_device(sharding, local, spec, spec)(x)


# A permutation's transpose is its inverse; stating it avoids a reduction over axes over which x is not split.
_moved.defvjp(lambda sharding, out, x: (_moved(sharding, out, x), None),
              lambda sharding, out, _, ct: (_moved(sharding, not out, ct),))
