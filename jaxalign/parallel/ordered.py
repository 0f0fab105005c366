"""The order of operations: of collectives when one CPU simulates several devices, and of gathers that must wait."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxalign.parallel.sharding import Sharding

Tree = TypeVar("Tree")
NEVER = -1.2345678e38  # A value that no sum in a step equals.


def after(sharding: Sharding, tree: Tree, first) -> Tree:
    """Returns the arrays of a pytree; on a mesh of several CPU devices they become available only after all arrays of `first`.

    XLA's CPU executor keeps the order of collectives within one computation, but not between a loop body and its surroundings
    or another loop: two devices may start different collectives first and deadlock. On one device and on other platforms the
    tree is returned unchanged.
    """
    return tree if sharding.mesh.size == 1 or sharding.platform != "cpu" else dependent(tree, first)


def dependent(tree: Tree, first) -> Tree:
    """Returns the arrays of a pytree, which become available only after all arrays of `first`, on any platform."""
    sums = jnp.stack([jax.lax.stop_gradient(jnp.sum(x.astype(jnp.float32))) for x in jax.tree.leaves(first)])
    there = jnp.all(sums != NEVER)
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), tree)
