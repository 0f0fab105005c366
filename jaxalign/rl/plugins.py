"""Calls functions that users register and checks their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError


def run_plugin(what: str, function: Callable, inputs: Any, returns: str, count: int) -> tuple:
    """`function(inputs)` as a tuple of `count` parts.

    Args:
      what: the function's name in error messages, such as "advantage estimator 'mine'".
      returns: describes the expected result.

    Raises:
      UserError: the function raises, or its result is not a sequence of `count` parts.
    """
    try:
        found = function(inputs)
    except UserError:
        raise
    except Exception as error:  # The user's function may raise anything.
        raise UserError(f"{what} failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, Sequence) or len(found) != count:
        shown = f"{len(found)} values" if isinstance(found, Sequence) else f"a value of type {type(found).__name__}"
        raise UserError(f"{what} returned {shown}; {returns} is expected")
    return tuple(found)


def require_float32(what: str, part: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raises UserError unless `array` is a float32 array of this shape. Also works on traced arrays."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise UserError(f"{what}: {part} is of type {type(array).__name__}; a float32 array of shape {shape} is expected")
    if tuple(array.shape) != tuple(shape) or array.dtype != jnp.float32:
        raise UserError(f"{what}: {part} is {array.dtype} of shape {tuple(array.shape)}; float32 of shape {tuple(shape)} is "
                        "expected")


def require_finite(what: str, part: str, array: jax.Array) -> None:
    """Raises UserError if a concrete array contains NaN or infinity."""
    if not bool(jnp.all(jnp.isfinite(array))):
        raise UserError(f"{what}: {part} has non-finite entries although all inputs are finite")
