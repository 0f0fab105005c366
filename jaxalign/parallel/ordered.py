"""The order of collectives where one CPU plays several devices."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxalign.parallel.sharding import Sharding, platform_of

Tree = TypeVar("Tree")
NEVER = -1.2345678e38  # No sum of anything that a step computes.


def after(sharding: Sharding | None, tree: Tree, first) -> Tree:
    """A pytree of arrays, on a mesh of CPU devices not there before all arrays of the pytree `first`.

    XLA's executor for CPUs keeps the order of the collectives of one computation, but not that of one in a loop's body and one
    beside the loop, or in another loop: two devices may each start another first, and both wait for ever. Elsewhere the tree is
    returned as it is.
    """
    if sharding is None or platform_of(sharding) != "cpu":
        return tree
    sums = jnp.stack([jax.lax.stop_gradient(jnp.sum(x.astype(jnp.float32))) for x in jax.tree.leaves(first)])
    there = jnp.all(sums != NEVER)
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), tree)
