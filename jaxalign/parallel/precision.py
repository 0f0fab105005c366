"""The precision of matrix products."""

from __future__ import annotations

import functools

import jax

from jaxalign.parallel.sharding import Sharding

FLOAT32_BITS = 23
_BITS = {"float32": FLOAT32_BITS, "tensorfloat32": 10, "float16": 10, "bfloat16": 7}
"""Explicit bits of the mantissa."""
_NAMES = {"highest": "float32", "high": "tensorfloat32"}
"""JAX's settings that are not formats."""
_PRESETS = {"F32_": FLOAT32_BITS, "F64_": FLOAT32_BITS, "TF32_": 10, "F16_": 10, "BF16_": 7}
"""How the names of JAX's algorithms (`jax.lax.DotAlgorithmPreset`) begin, which all platforms follow."""
_TF32_CAPABILITY = 8.0
"""The compute capability of Ampere, the first NVIDIA GPUs with TensorFloat-32."""


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


def product_bits(compute_dtype: str, sharding: Sharding) -> int:
    """The mantissa bits to which the inputs of matrix products are rounded: 23 (float32), 10 (TensorFloat-32 or float16) or 7
    (bfloat16).

    Args:
      compute_dtype: the dtype of the products' inputs: "float32", "float16" or "bfloat16".
      sharding: its platform has its own default for float32 inputs, which JAX's current setting overrides.
    """
    if compute_dtype != "float32":
        return _BITS[compute_dtype]
    setting = jax.config.jax_default_matmul_precision or "default"
    for prefix, bits in _PRESETS.items():
        if setting.startswith(prefix):
            return bits
    name = _NAMES.get(setting, setting)
    if sharding.platform == "tpu":
        return _BITS.get(name, _BITS["bfloat16"])
    has_tf32 = sharding.nvidia and float(getattr(sharding.device, "compute_capability", _TF32_CAPABILITY)) >= _TF32_CAPABILITY
    if not has_tf32:
        return FLOAT32_BITS
    return FLOAT32_BITS if name == "float32" else _BITS["tensorfloat32"]
