"""The order of collectives where one CPU plays several devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.parallel.sharding import Sharding


def after(sharding: Sharding | None, x: jax.Array, *first: jax.Array) -> jax.Array:
    """x (integers), on a mesh of CPU devices not there before all of `first`, which are scalars of at least 0.

    XLA's executor for CPUs keeps the order of the collectives of one computation, but not that of one in a loop's body and one
    beside the loop: two devices may each start another first, and both wait for ever. Elsewhere x is returned as it is.
    """
    if sharding is None or sharding.mesh.devices.flat[0].platform != "cpu":
        return x
    there = functools.reduce(jnp.logical_and, [scalar >= 0 for scalar in first])
    return jnp.where(there, x, 0)
