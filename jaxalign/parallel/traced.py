"""Tracing a function once where both the shapes of its result and the result are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


def traced(fn: Callable, *arguments: Any) -> tuple[Callable, Any]:
    """Traces a function for the body of a loop that starts from zeros, or for a branch whose alternative is zeros.

    `jax.eval_shape` and the call would trace it twice, and every level of loops doubles that. Tracing and lowering take longer
    than compiling for small models.

    Args:
      fn: a function of pytrees of arrays; it may read arrays of the enclosing trace.
      arguments: arrays, or ShapeDtypeStructs, with the shapes and dtypes of the later calls.

    Returns:
      (a function with the same result, which is valid within the enclosing trace; the result's ShapeDtypeStructs).
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    run, structure = jaxpr_as_fun(closed), jax.tree.structure(shapes)

    def call(*arguments: Any) -> Any:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(arguments)))

    return call, shapes
