"""Jitted programs whose compiler options depend on the devices of their arguments."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

OVERLAP = {"xla_gpu_enable_analytical_latency_estimator": True}
"""Options for programs on several GPUs: the scheduler estimates the time of each kernel and each transfer. By default it
assumes fixed times, and on 64 GPUs three quarters of the gathered bytes of an update arrive before the next product starts
(docs/gpus.md)."""


@functools.cache
def supports(option: str, value: bool | int) -> bool:
    """Whether XLA has a compiler option; logs a warning if not. Later versions of XLA may have dropped it, and a program that
    names an unknown option cannot be compiled."""
    try:
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logging.getLogger("jaxalign").warning("programs are compiled without the option %s: %s", option, error)
        return False
    return True


class MeshProgram:
    """A jitted function, compiled with `OVERLAP` if the first array of its arguments with a mesh is on several GPUs.

    It is called, traced and lowered like the result of `jax.jit`. An option that XLA_FLAGS sets keeps that value, and one that
    XLA does not have is left out.

    Args:
      function: the function.
      jit: further arguments of `jax.jit`.
    """

    def __init__(self, function: Callable, **jit: Any):
        functools.update_wrapper(self, function)
        self._jit = functools.partial(jax.jit, function, **jit)
        self._plain = self._jit()

    def __call__(self, *args: Any) -> Any:
        return self._for(args)(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        return self._for(args).trace(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self._for(args).lower(*args)

    def _for(self, args: tuple) -> Callable:
        shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
        meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh))
        mesh = next(meshes, None)
        on_gpus = mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "gpu"
        return self._overlapping if on_gpus else self._plain

    @functools.cached_property
    def _overlapping(self) -> Callable:
        given = os.environ.get("XLA_FLAGS", "")
        chosen = {name: value for name, value in OVERLAP.items() if name not in given and supports(name, value)}
        return self._jit(compiler_options=chosen or None)
