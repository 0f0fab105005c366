"""The precision of matrix products: in the text of lowered programs, and as the bits that the tolerances of checks follow."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from jaxalign.parallel.precision import product_bits, use_matmul_precision


@pytest.fixture
def restored():
    yield
    use_matmul_precision("default")


def lowered() -> str:
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return jax.jit(lambda x: x @ x).lower(x).as_text()


@pytest.mark.parametrize(("name", "precision"), [("float32", "HIGHEST"), ("tensorfloat32", "HIGH")])
def test_products_are_lowered_with_the_chosen_precision(restored, name, precision):
    before = lowered()
    use_matmul_precision(name)
    assert f"precision = [{precision}, {precision}]" in lowered()
    use_matmul_precision("default")
    assert lowered() == before and "HIGH" not in before


def placed(platform: str, **device) -> types.SimpleNamespace:
    """The fields of a `Sharding` that say on which devices it is."""
    nvidia = platform == "gpu" and "compute_capability" in device
    return types.SimpleNamespace(platform=platform, nvidia=nvidia, device=types.SimpleNamespace(**device))


HOPPER, VOLTA = placed("gpu", compute_capability="9.0"), placed("gpu", compute_capability="7.0")
AMD, TPU, CPU = placed("gpu"), placed("tpu"), placed("cpu")


@pytest.mark.parametrize(("dtype", "where", "setting", "bits"), [
    ("float32", CPU, "default", 23), ("float32", HOPPER, "default", 10), ("float32", HOPPER, "float32", 23),
    ("float32", HOPPER, "tensorfloat32", 10), ("float32", VOLTA, "default", 23), ("float32", AMD, "default", 23),
    ("float32", HOPPER, "highest", 23), ("float32", TPU, "high", 10), ("float32", CPU, "BF16_BF16_F32", 7),
    ("float32", HOPPER, "F32_F32_F32", 23), ("float32", TPU, "TF32_TF32_F32", 10),
    ("float32", TPU, "default", 7), ("float32", TPU, "tensorfloat32", 10), ("float32", TPU, "float32", 23),
    ("bfloat16", CPU, "default", 7), ("bfloat16", HOPPER, "float32", 7), ("float16", TPU, "default", 10),
])
def test_the_bits_of_a_product_follow_dtype_platform_and_setting(restored, dtype, where, setting, bits):
    use_matmul_precision(setting)
    assert product_bits(dtype, where) == bits
