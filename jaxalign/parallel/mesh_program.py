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
ON_CPUS = {"xla_cpu_use_fusion_emitters": False}
"""Options for programs on CPUs. Without XLA's newer fusion emitters, compilation takes less time, and the peak memory of a
stage that compiles its programs is 275 to 410 MB lower. Steps take up to 3% longer (benchmarks/RESULTS.md)."""

IN_ONE_PART = ON_CPUS | {"xla_cpu_parallel_codegen_split_count": 1}
"""`ON_CPUS` for programs that are compiled several at a time. By default XLA generates the code of a program in up to 32 parts
in parallel; stage revise then needs 7 to 24 MB more (benchmarks/RESULTS.md)."""


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
    """A jitted function with compiler options for its devices: `OVERLAP` on several GPUs, `on_cpus` on CPUs.

    The devices are those of the first array among its arguments that has a mesh; if none has, there are no options.

    It is called, traced and lowered like the result of `jax.jit`. An option that XLA_FLAGS sets keeps that value, and one that
    XLA does not have is left out. Inside another jitted function, the options of that function apply.

    Args:
      function: the function.
      overlap: False leaves out `OVERLAP`.
      on_cpus: the options on CPUs.
      jit: further arguments of `jax.jit`.
    """

    def __init__(self, function: Callable, overlap: bool = True, on_cpus: dict[str, Any] = ON_CPUS, **jit: Any):
        functools.update_wrapper(self, function)
        self._jit = functools.partial(jax.jit, function, **jit)
        self._plain, self._overlap, self._options = self._jit(), overlap, on_cpus

    def __call__(self, *args: Any) -> Any:
        return self._for(args)(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        return self._for(args).trace(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self._for(args).lower(*args)

    def clear_cache(self) -> None:
        """Frees the compiled programs."""
        for name in ("_plain", "_overlapping", "_on_cpus"):
            if name in self.__dict__:
                getattr(self, name).clear_cache()

    def _for(self, args: tuple) -> Callable:
        leaves = jax.tree.leaves(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._plain
        shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
        meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh))
        mesh = next(meshes, None)
        platform = None if mesh is None else mesh.devices.flat[0].platform
        if platform == "cpu":
            return self._on_cpus
        return self._overlapping if platform == "gpu" and mesh.size > 1 and self._overlap else self._plain

    @functools.cached_property
    def _overlapping(self) -> Callable:
        return self._jit(compiler_options=available(OVERLAP))

    @functools.cached_property
    def _on_cpus(self) -> Callable:
        return self._jit(compiler_options=available(self._options))


def available(options: dict[str, Any]) -> dict[str, Any] | None:
    """The options that XLA_FLAGS does not set and that XLA has; None if there are none."""
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given and supports(name, value)} or None
