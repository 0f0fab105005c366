"""Guards: invalid arguments are refused by name before anything is computed; valid narrow types are widened."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign import advantages
from jaxalign.algorithms import guards
from jaxalign.algorithms.advantages import gae
from jaxalign.algorithms.calibration import reliability_bins
from jaxalign.algorithms.kl import full_kl, kl_penalty
from jaxalign.algorithms.labels import average_orders, option_label
from jaxalign.algorithms.masked import aggregate, masked_mean, masked_sum, masked_variance, whiten
from jaxalign.algorithms.policy_losses import clipped_surrogate
from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.algorithms.value_losses import clipped_value_loss, explained_variance

TWO_ARGUMENTS = (
    masked_sum, masked_mean, masked_variance, whiten, aggregate, kl_penalty, full_kl, option_label, average_orders,
    reliability_bins,
)
THREE_ARGUMENTS = (gae, clipped_surrogate, clipped_value_loss, explained_variance, bradley_terry)


@pytest.mark.parametrize("function", [*TWO_ARGUMENTS, *THREE_ARGUMENTS], ids=lambda function: function.__name__)
def test_nothing_is_broadcast(function):
    # [B, 1] against [B, T] and [T] against [B, T] are the usual mistakes; NumPy would accept both.
    full = np.zeros((2, 3), np.float32)
    for other in (np.zeros((2, 1), np.float32), np.zeros(3, np.float32)):
        arguments = [full, other] if function in TWO_ARGUMENTS else [full, full, other]
        with pytest.raises(ValueError, match=r"the same shape.*\(2, 3\)"):
            function(*arguments)
        with pytest.raises(ValueError, match="the same shape"):
            jax.eval_shape(function, *arguments)


@pytest.mark.parametrize("function", TWO_ARGUMENTS[:5] + (kl_penalty, option_label), ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_narrow_types_are_computed_in_float32(function, dtype):
    assert jax.eval_shape(function, jnp.ones((2, 3), dtype), jnp.ones((2, 3), dtype)).dtype == jnp.float32


def test_a_bfloat16_sum_is_accurate():
    # 256 + 1 is 256 in bfloat16: a sum of 1,024 ones would stick at 256.
    ones = jnp.ones((4, 256), jnp.bfloat16)
    assert float(masked_sum(ones, ones)) == 1024


def test_complex_numbers_are_refused():
    with pytest.raises(ValueError, match="x has dtype complex64"):
        masked_sum(np.zeros(3, np.complex64), np.ones(3))


def test_require_range_names_the_value_and_lets_tracers_pass():
    with pytest.raises(ValueError, match=r"label is 1\.5; in \[0, 1\] is expected"):
        guards.require_range("label", np.array([0.5, 1.5]), 0, 1)
    with pytest.raises(ValueError, match="label is nan"):
        guards.require_range("label", np.array([np.nan]), 0, 1)
    jax.jit(lambda x: guards.require_range("label", x, 0, 1))(jnp.array([7.0]))


def test_require_positive_refuses_zero():
    with pytest.raises(ValueError, match="scale is 0.0; a number above 0 is expected"):
        guards.require_positive("scale", 0.0)


def test_require_choice_lists_the_choices():
    with pytest.raises(ValueError, match="kind is 'k4'; one of k1, k2 is expected"):
        guards.require_choice("kind", "k4", ("k1", "k2"))


def test_require_shape_says_what_is_expected():
    with pytest.raises(ValueError, match=r"scores has shape \(3, 1\); \[B\] = \(3,\) is expected"):
        guards.require_shape("scores", np.zeros((3, 1)), "[B]", (3,))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\); \[B, T\] = \('any', 'any'\) is expected"):
        guards.require_shape("mask", np.zeros(3), "[B, T]", (None, None))


@pytest.mark.parametrize("name", ["rloo", "grpo", "remax", "gae", "discounted_returns", "whiten", "broadcast_to_tokens"])
def test_nested_lists_are_accepted_like_arrays(name):
    rng, ones = np.random.default_rng(0), np.ones((4, 3), np.float32)
    tokens, rows = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (4,)))
    arguments = {
        "rloo": (rows, 2), "grpo": (rows, 2), "remax": (rows, rows[::-1].copy()), "gae": (tokens, tokens + 1, ones),
        "discounted_returns": (tokens, ones), "whiten": (tokens, ones), "broadcast_to_tokens": (rows, ones),
    }[name]
    function = getattr(advantages, name)
    lists = (x.tolist() if isinstance(x, np.ndarray) else x for x in arguments)
    jax.tree.map(np.testing.assert_array_equal, function(*lists), function(*arguments))


@pytest.mark.parametrize("scores", [[[1.0, 2.0], [3.0]], "abc", [["a"]], None, [None, 1.0], [1.0, object()], [[]], {}])
def test_other_values_are_refused_with_a_value_error(scores):
    with pytest.raises(ValueError):
        advantages.rloo(scores, 2)
