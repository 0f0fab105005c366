"""`linear` equals its einsum, with the same gradients, and computes no gradient for frozen inputs."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models.layers import linear

CASES = [
    ("btd,df->btf", (2, 3, 4), (4, 6)),  # wide: x is transposed
    ("btf,fd->btd", (2, 3, 6), (6, 4)),  # narrow: the cotangent is transposed
    ("btd,dnh->btnh", (2, 3, 4), (4, 2, 3)),
    ("btnh,nhd->btd", (2, 3, 4, 5), (4, 5, 6)),
    ("btnh,nhd->btd", (2, 3, 1, 5), (1, 5, 6)),
]


def arrays(x, kernel):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x, kernel))


@pytest.mark.parametrize(("equation", "x", "kernel"), CASES)
def test_values_and_gradients_equal_those_of_the_einsum(equation, x, kernel):
    given = arrays(x, kernel)

    def loss(product):
        return lambda x, kernel: jnp.sum(jnp.sin(product(equation, x, kernel)))

    found, gradients = jax.value_and_grad(loss(linear), argnums=(0, 1))(*given)
    expected, wanted = jax.value_and_grad(loss(jnp.einsum), argnums=(0, 1))(*given)
    np.testing.assert_array_equal(found, expected)
    chex.assert_trees_all_close(gradients, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trained", [0, 1])
def test_frozen_inputs_have_no_gradient_and_no_residuals(trained):
    """The jaxpr of the backward pass has only one of the two products, in a scan of layers as well."""
    x, kernels = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 4))

    def loss(*given):
        scan = jax.lax.scan(lambda x, kernel: (linear("btd,df->btf", x, kernel), None), *given)
        return jnp.sum(scan[0])

    def products(argnums):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=argnums))(x, kernels)
        return str(jaxpr).count("dot_general[")

    if trained == 0:
        assert products(0) == products((0, 1)) - 1
    else:  # Gradients of earlier layers' kernels need the gradient of x.
        assert products(1) == products((0, 1))
