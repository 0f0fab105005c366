"""The precision of float32 matrix products."""

from __future__ import annotations

import functools

import jax


def use_matmul_precision(name: str) -> None:
    """Sets the precision of float32 matrix products for all programs that this process compiles from now on.

    Kernels of fused attention choose their own precision.

    Args:
      name: `config.model.matmul_precision`; "default" is JAX's setting at the first call.
    """
    own = _initial()
    jax.config.update("jax_default_matmul_precision", own if name == "default" else name)


@functools.cache
def _initial() -> str | None:
    return jax.config.jax_default_matmul_precision
