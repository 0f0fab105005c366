"""Argument checks at the start of the public functions of this package.

They read shapes and dtypes, so they cost nothing once jitted. chex checks the shapes, here as elsewhere in the package; these
functions raise a ValueError that names the argument, where chex's AssertionError only numbers the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np


def as_float(name: str, x: Any) -> jax.Array:
    """`x` as an array of at least float32: integers, bools and narrower floats are cast to float32; float64 stays float64.

    Raises:
      ValueError: `x` is complex or not numeric.
    """
    return jnp.asarray(x, jnp.promote_types(require_real(name, x), jnp.float32))


def is_set(mask: Any) -> jax.Array:
    """A bool array, True where `mask` is not 0. Raises ValueError if `mask` is complex or not numeric."""
    require_real("mask", mask)
    return jnp.asarray(mask) != 0


def require_real(name: str, x: Any) -> Any:
    """The dtype of `x`, an array, a number or nested lists. Raises ValueError unless that is bool, int or float."""
    try:
        if x is None:  # JAX would read it as float32.
            raise TypeError("None")
        if isinstance(x, int):
            float(x)  # Raises OverflowError for integers that no array can contain.
        dtype = jnp.asarray(x).dtype if isinstance(x, list | tuple) else jnp.result_type(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from None
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise ValueError(f"{name} has dtype {dtype}; real numbers are expected")
    return dtype


def require_same_shape(**arrays: Any) -> None:
    """Raises ValueError, naming the arrays and their shapes, unless all have the same shape (nothing is broadcast)."""
    arrays = {name: _shaped(name, x) for name, x in arrays.items()}
    try:
        chex.assert_equal_shape(list(arrays.values()))
    except AssertionError:
        listed = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ValueError(f"these must have the same shape: {listed}") from None


def require_shape(name: str, x: Any, letters: str, sizes: Sequence[int | None]) -> None:
    """Raises ValueError unless `x` has the given sizes (None: any). `letters` is the shape as written in docstrings."""
    x = _shaped(name, x)
    try:
        chex.assert_shape(x, tuple(sizes))
    except AssertionError:
        expected = tuple("any" if size is None else size for size in sizes)
        raise ValueError(f"{name} has shape {x.shape}; {letters} = {expected} is expected") from None


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(choices)} is expected")


def require_range(name: str, x: Any, low: float, high: float = np.inf, tolerance: float = 0.0) -> None:
    """Raises ValueError if an element of `x` is outside [low, high] or NaN. For a traced `x` only the dtype is checked."""
    require_real(name, x)
    values = _known(x)
    if values is None:
        return
    inside = (values >= low - tolerance) & (values <= high + tolerance)
    if not inside.all():
        expected = f"at least {low}" if high == np.inf else f"in [{low}, {high}]"
        raise ValueError(f"{name} is {np.extract(~inside, values)[0]}; {expected} is expected")


def require_positive(name: str, x: Any) -> None:
    """Raises ValueError if an element of `x` is not above 0. For a traced `x` only the dtype is checked."""
    require_real(name, x)
    values = _known(x)
    if values is not None and not (values > 0).all():
        raise ValueError(f"{name} is {np.extract(~(values > 0), values)[0]}; a number above 0 is expected")


def require_scalar(name: str, x: Any, low: float, high: float = np.inf) -> None:
    """Raises ValueError unless `x` is a scalar in [low, high]. For a traced `x` only the shape and the dtype are checked."""
    require_shape(name, x, "scalar", ())
    require_range(name, x, low, high)


def require_positive_scalar(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a scalar above 0. For a traced `x` only the shape and the dtype are checked."""
    require_shape(name, x, "scalar", ())
    require_positive(name, x)


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """The shape of `x`, an array, a number or nested lists. Raises ValueError if the lists differ in length."""
    return _shaped(name, x).shape


def require_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {str(value)[:40]!r}; True or False is expected")


def require_axis(name: str, axis: Any, ndim: int) -> None:
    """Raises ValueError unless `axis` is None, an axis of an array of `ndim` axes, or a tuple of them."""
    axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) and -ndim <= one < ndim for one in axes):
        raise ValueError(f"{name} is {str(axis)[:40]!r}; None, or whole numbers in [{-ndim}, {ndim}), are expected")


def _shaped(name: str, x: Any) -> Any:
    # chex reads the attribute `shape`, which numbers and lists lack. The dtype is not read.
    if hasattr(x, "shape"):
        return x
    try:
        return jax.ShapeDtypeStruct(np.shape(x), jnp.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array: {error}") from None


def _known(x: Any) -> np.ndarray | None:
    # Under `jit` there is no value yet, and no host has the whole of an array that spans hosts.
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)
