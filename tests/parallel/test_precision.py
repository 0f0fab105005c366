"""The precision of float32 matrix products, in the text of lowered programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxalign.parallel.precision import use_matmul_precision


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
