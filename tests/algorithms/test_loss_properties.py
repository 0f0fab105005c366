"""Properties of every masked function, from one table.

Masked values, the position and amount of padding, and the distribution of rows over devices change neither value nor gradient.
An all-zero mask gives 0. Narrow dtypes are widened. Gradients equal finite differences. A wrong shape or dtype of any argument
raises while tracing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jaxalign.algorithms import (
    advantages,
    best_of_n,
    calibration,
    direct_preference,
    ensembles,
    groups,
    importance,
    kl,
    kto,
    masked,
    policy_losses,
    preference_losses,
    reference_free,
    rewards,
    value_losses,
)
from jaxalign.parallel.mesh import make_mesh
from tests import tiny

# Samplers: each draws an array of this shape from the random generator.


def real(rng, shape):
    return rng.normal(size=shape)


def logprob(rng, shape):
    return -rng.gamma(3.0, 0.3, shape) - 0.01


def share(rng, shape):
    return rng.choice([0.0, 0.25, 0.5, 1.0], shape)


def chance(rng, shape):
    return rng.uniform(0.05, 0.95, shape)


def count(rng, shape):
    return rng.integers(1, 9, shape).astype(float)


@dataclasses.dataclass(frozen=True)
class Case:
    """call(arrays by name, mask); learnt: has a gradient; constant: must have none; rank 1: [B], 2: [B, T].

    trailing: axes of an input beyond those of the mask. alone: rows are independent. empty: the result of an all-zero mask.
    """

    call: Callable[[Mapping[str, Any], Any], Any]
    inputs: Mapping[str, Callable]
    rank: int = 1
    learnt: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    trailing: tuple[int, ...] = ()
    alone: bool = True
    empty: tuple[float, ...] | None = None


CASES: dict[str, Case] = {}


def _pair(x: Mapping[str, Any], *names: str) -> tuple:
    return tuple(x[name] for name in names or ("chosen", "rejected", "ref_chosen", "ref_rejected"))



# Tokens, [B, T]: policy losses.
_POLICY = {"logprobs": logprob, "old": logprob, "advantages": real}
for _name, _call in {
    "clip": lambda x, m: policy_losses.clipped_surrogate(*_pair(x, *_POLICY), 0.2, 0.28, m)[0],
    "dual clip": lambda x, m: policy_losses.clipped_surrogate(*_pair(x, *_POLICY), mask=m, dual_clip=1.4)[0],
    "cispo": lambda x, m: policy_losses.cispo(*_pair(x, *_POLICY), 0.5, 0.3, m)[0],
    "gspo": lambda x, m: policy_losses.gspo(*_pair(x, *_POLICY), 0.1, 0.2, m)[0],
}.items():
    CASES[_name] = Case(_call, _POLICY, 2, ("logprobs",), ("old", "advantages"))
CASES |= {
    "plain": Case(
        lambda x, m: policy_losses.policy_gradient(x["logprobs"], x["advantages"], m),
        {"logprobs": logprob, "advantages": real}, 2, ("logprobs",), ("advantages",)),
    "decoupled": Case(
        lambda x, m: policy_losses.decoupled_surrogate(x["logprobs"], x["proximal"], x["old"], x["advantages"], mask=m)[0],
        _POLICY | {"proximal": logprob}, 2, ("logprobs",), ("old", "advantages", "proximal")),
}
for _level in importance.LEVELS:
    for _mode in importance.MODES:
        CASES[f"importance {_level} {_mode}"] = Case(
            lambda x, m, a=(_level, _mode): importance.importance_weights(x["logprobs"], x["old"], m, *a, 0.7, 1.5)[0],
            {"logprobs": logprob, "old": logprob}, 2, (), ("logprobs", "old"))
CASES["effective samples"] = Case(
    lambda x, m: importance.effective_sample_share(x["weights"], m), {"weights": chance}, 2, ("weights",), alone=False
)
for _kind in kl.LOSSES:
    CASES[f"kl {_kind}"] = Case(
        lambda x, m, k=_kind: kl.kl_loss(x["logprobs"], x["reference"], k, m), {"logprobs": logprob, "reference": logprob},
        2, ("logprobs",), ("reference",), trailing=(4,) if _kind == "full" else ())

# Value losses.
for _clip in (None, 0.2):
    CASES[f"value {_clip}"] = Case(
        lambda x, m, c=_clip: value_losses.clipped_value_loss(x["values"], x["old"], x["returns"], c, m)[0],
        {"values": real, "old": real, "returns": real}, 2, ("values",), ("old", "returns"))
    CASES[f"huber {_clip}"] = Case(
        lambda x, m, c=_clip: value_losses.huber_value_loss(x["values"], x["returns"], 0.7, m, x["old"], c)[0],
        {"values": real, "old": real, "returns": real}, 2, ("values",), ("old", "returns"))
CASES["explained variance"] = Case(
    lambda x, m: value_losses.explained_variance(x["values"], x["returns"], m), {"values": real, "returns": real}, 2,
    ("values", "returns"), alone=False)

# Statistics and aggregation.
for _function in (masked.masked_sum, masked.masked_mean, masked.masked_variance):
    CASES[_function.__name__] = Case(lambda x, m, f=_function: f(x["x"], m), {"x": real}, 2, ("x",), alone=False)
for _keep in (True, False):
    CASES[f"whiten {_keep}"] = Case(lambda x, m, k=_keep: masked.whiten(x["x"], m, k), {"x": real}, 2, ("x",), alone=False)
for _mode in masked.AGGREGATIONS:
    CASES[_mode] = Case(
        lambda x, m, k=_mode: masked.aggregate(x["loss"], m, k, max_length=5), {"loss": real}, 2, ("loss",), alone=False
    )

# Advantages and returns.
_LAST = np.array([0.5, -1.0, 2.0, 0.1])
_RV = {"rewards": real, "values": real}
CASES |= {
    "gae": Case(lambda x, m: advantages.gae(x["rewards"], x["values"], m, 0.9, 0.8), _RV, 2, ("rewards", "values")),
    "discounted": Case(lambda x, m: advantages.discounted_returns(x["rewards"], m, 0.9), {"rewards": real}, 2, ("rewards",)),
    "lambda-returns": Case(
        lambda x, m: advantages.lambda_returns(x["rewards"], x["values"], m, 0.9, 0.8), _RV, 2, ("rewards", "values")),
    "reinforce": Case(
        lambda x, m: advantages.reinforce_baseline(x["rewards"], x["values"], m, 0.9), _RV, 2, ("rewards", "values")),
    "vtrace": Case(
        lambda x, m: advantages.vtrace(x["rewards"], x["values"], x["log_ratios"], m, 0.9, 0.8), _RV | {"log_ratios": real}, 2,
        ("rewards", "values"), ("log_ratios",)),
    "reinforce++": Case(
        lambda x, m: advantages.reinforce_plus_plus(x["rewards"], m, 0.9), {"rewards": real}, 2, ("rewards",), alone=False),
    "reinforce++ baseline": Case(
        lambda x, m: advantages.reinforce_plus_plus(x["rewards"], m, 0.9, 2), {"rewards": real}, 2, ("rewards",), alone=False),
}

# Rows, [B]: pairs of answers.
_PAIR = {"chosen": logprob, "rejected": logprob, "ref_chosen": logprob, "ref_rejected": logprob, "label": share}
_COUNTS = {"chosen_lengths": count, "rejected_lengths": count}
_HELD = ("ref_chosen", "ref_rejected", "label")


for _kind in direct_preference.DPO_KINDS:
    _options = {"kind": _kind, "label_smoothing": 0.1, "discopop_tau": 0.2}
    CASES[_kind] = Case(
        lambda x, m, o=_options: direct_preference.dpo(
            *_pair(x), 0.7, x["label"], chosen_lengths=x.get("chosen_lengths"), rejected_lengths=x.get("rejected_lengths"),
            mask=m, **o)[0],
        _PAIR | (_COUNTS if _kind == "ipo_mean" else {}), 1, ("chosen", "rejected"), _HELD,
        # bco_pair computes its baseline from these rows.
        alone=_kind not in ("aot", "aot_unpaired", "bco_pair"))
_TWO = {"chosen": logprob, "rejected": logprob, "label": share}
CASES |= {
    "bco_pair, baseline": Case(
        lambda x, m: direct_preference.dpo(*_pair(x), 0.7, x["label"], "bco_pair", mask=m, baseline=0.2)[0], _PAIR, 1,
        ("chosen", "rejected"), _HELD),
    "bco_baseline": Case(
        lambda x, m: direct_preference.bco_baseline(*_pair(x), 0.7, m), {k: v for k, v in _PAIR.items() if k != "label"}, 1,
        (), ("chosen", "rejected", "ref_chosen", "ref_rejected"), alone=False),
    "mixed_dpo": Case(
        lambda x, m: direct_preference.mixed_dpo(
            *_pair(x), {"sigmoid": 0.8, "ipo_mean": 0.2, "sft": 1.0}, 0.7, x["label"], 0.1, *_pair(x, *_COUNTS), m)[0],
        _PAIR | _COUNTS, 1, ("chosen", "rejected"), _HELD),
    "sft": Case(lambda x, m: direct_preference.sft_loss(*_pair(x, *_TWO), m), _TWO, 1, ("chosen", "rejected"), ("label",)),
    "kto": Case(
        lambda x, m: kto.kto(x["policy"], x["ref"], x["label"], 0.3, 0.7, 1.3, 0.8, m)[0],
        {"policy": logprob, "ref": logprob, "label": share}, 1, ("policy",), ("ref", "label")),
    "kto_baseline": Case(
        lambda x, m: kto.kto_baseline(x["policy"], x["ref"], m), {"policy": logprob, "ref": lambda r, s: logprob(r, s) - 1}, 1,
        (), ("policy", "ref"), alone=False),
    "orpo": Case(
        lambda x, m: reference_free.orpo(x["chosen"], x["rejected"], 0.3, x["label"], x["nll"], m)[0], _TWO | {"nll": real}, 1,
        ("chosen", "rejected", "nll"), ("label",)),
    "cpo": Case(
        lambda x, m: reference_free.cpo(x["chosen"], x["rejected"], 0.3, x["label"], x["nll"], 0.5, m)[0],
        _TWO | {"nll": real}, 1, ("chosen", "rejected", "nll"), ("label",)),
    "simpo": Case(
        lambda x, m: reference_free.simpo(x["chosen"], x["rejected"], 2.0, 0.5, x["label"], m)[0], _TWO, 1,
        ("chosen", "rejected"), ("label",)),
    # Scores.
    "bradley_terry": Case(
        lambda x, m: preference_losses.bradley_terry(x["a"], x["b"], x["label"], 0.1, x["margin"], m),
        {"a": real, "b": real, "label": share, "margin": chance}, 1, ("a", "b")),
    "regression": Case(
        lambda x, m: preference_losses.score_regression(x["a"], x["b"], m), {"a": real, "b": real}, 1, ("a",), ("b",)),
    "huber regression": Case(
        lambda x, m: preference_losses.score_regression(x["a"], x["b"], m, 0.7), {"a": real, "b": real}, 1, ("a",), ("b",)),
    "score_statistics": Case(
        lambda x, m: rewards.score_statistics(x["scores"], m), {"scores": real}, 1, ("scores",), alone=False, empty=(0, 1)),
    # The axis of K rewards or members comes first.
    "combine_scores": Case(
        lambda x, m: rewards.combine_scores(x["scores"].T, np.array([1.0, -0.5, 2.0]), jnp.stack([m] * 3))[0], {"scores": real},
        1, ("scores",), trailing=(3,)),
}
for _how in ensembles.COMBINATIONS:
    CASES[f"ensemble {_how}"] = Case(
        lambda x, m, h=_how: ensembles.combine(x["scores"].T, h, 0.7, m), {"scores": real}, 1, ("scores",), trailing=(3,)
    )
for _name, _call in {
    "rloo": lambda x, m: groups.rloo(x["scores"], 2, m),
    "grpo std": lambda x, m: groups.grpo(x["scores"], 2, "std", m, eps=0.3),
    "grpo none": lambda x, m: groups.grpo(x["scores"], 2, "none", m),
    "informative_groups": lambda x, m: groups.informative_groups(x["scores"], 2, m),
    "rejection_sample": lambda x, m: best_of_n.rejection_sample(x["scores"], 2, -0.5, 1, m),
}.items():
    CASES[_name] = Case(_call, {"scores": real}, 1, ("scores",) if "o " in _name or _name == "rloo" else (), alone=False)
CASES |= {
    "remax": Case(
        lambda x, m: groups.remax(x["scores"], x["greedy"], m), {"scores": real, "greedy": real}, 1, ("scores", "greedy")),
    "broadcast_to_tokens": Case(
        lambda x, m: groups.broadcast_to_tokens(x["scores"], jnp.stack([m, m], axis=1))[:, 1], {"scores": real}, 1,
        ("scores",)),
    "expected_best_of": Case(
        lambda x, m: best_of_n.expected_best_of(x["scores"], 2, x["values"], m), {"scores": real, "values": real}, 1,
        ("values",), ("scores",), alone=False),
    # Calibration.
    "calibration error": Case(
        lambda x, m: calibration.expected_calibration_error(x["prob"], x["label"], 5, m), {"prob": chance, "label": chance},
        1, ("prob",), ("label",), alone=False),
    "temperature": Case(
        lambda x, m: calibration.fit_temperature(x["margin"], x["label"], m), {"margin": real, "label": chance}, 1,
        (), ("margin", "label"), alone=False, empty=(1,)),
}

ROWS, TOKENS = 4, 3
# The gradients of the other cases are checked next to their worked figures. The weights of CISPO and the ratio of GSPO have no
# gradient, and neither does the baseline that bco_pair computes from these rows.
CHECKED_HERE = [
    "effective samples", "explained variance", *("masked_sum", "masked_mean", "masked_variance", "whiten True", "whiten False"),
    *masked.AGGREGATIONS, "mixed_dpo", "sft", "score_statistics", "combine_scores", "remax", "broadcast_to_tokens",
    "expected_best_of", "calibration error",
]
GARBAGE = (999.0, np.inf, np.nan)
every_case = pytest.mark.parametrize("name", CASES)


def dense(case: Case, seed: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)[: case.rank] + case.trailing
    return {name: sample(rng, shape) for name, sample in case.inputs.items()}


def padded(case: Case, arrays, garbage: float, rows: slice, places: list[int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the same numbers surrounded by garbage, in 16 rows, and with 8 tokens for cases with tokens."""
    shape = (16, 8)[: case.rank]
    where = (rows, places) if case.rank == 2 else (rows,)
    mask = np.zeros(shape, np.float32)
    mask[where] = 1
    wide = {name: np.full(shape + case.trailing, garbage) for name in arrays}
    for name, x in arrays.items():
        wide[name][where] = x
    return wide, mask


def nothing(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return NaN everywhere in the shape that `padded` returns, and an all-zero mask."""
    wide, mask = padded(case, dense(case), np.nan, slice(0, 4), [0, 1, 2])
    return {name: np.full_like(x, np.nan) for name, x in wide.items()}, np.zeros_like(mask)


def parts(case: Case, arrays, mask) -> list[jax.Array]:
    return jax.tree.leaves(case.call(arrays, mask))


def total(case: Case, arrays, mask) -> tuple[jax.Array, list[jax.Array]]:
    """Return a number that depends on every part of the result, including padding, and on each element differently."""
    found = parts(case, arrays, mask)
    return sum(jnp.sum(jnp.sin(x + 0.3)) for x in found if jnp.issubdtype(x.dtype, jnp.floating)) + 0.0, found


@functools.cache
def program(name: str):
    """Jitted (arrays, mask) -> (gradients with respect to every array, parts of the result)."""
    gradient = jax.grad(functools.partial(total, CASES[name]), has_aux=True)
    return jax.jit(gradient, compiler_options=tiny.COMPILE_FAST)


@every_case
def test_masked_values_padding_side_and_length_change_nothing(name):
    case = CASES[name]
    arrays, gradients = dense(case), {}
    expected = parts(case, arrays, np.ones((ROWS, TOKENS)[: case.rank], np.float32))
    places = ([0, 1, 2], [5, 6, 7], [1, 2, 5]) if case.rank == 2 else ([],) * 3  # right, left, with a gap
    for garbage in GARBAGE:
        for rows, columns in zip((slice(0, 4), slice(12, 16), slice(4, 8)), places, strict=True):
            wide, mask = padded(case, arrays, garbage, rows, columns)
            where = mask != 0
            found_gradients, found = program(name)(wide, mask)
            for part, value in zip(found, expected, strict=True):
                if jnp.ndim(value):
                    assert not np.asarray(part)[~where].any()
                    part = np.asarray(part)[where].reshape(jnp.shape(value))
                np.testing.assert_allclose(part, value, rtol=1e-5, atol=2e-6)
            for key in case.learnt:
                assert not np.asarray(found_gradients[key])[~where].any(), key
                kept = np.asarray(found_gradients[key])[where]
                np.testing.assert_allclose(kept, gradients.setdefault(key, kept), rtol=1e-4, atol=1e-5, err_msg=key)
                assert np.abs(kept).max() > 1e-3, key
            for key in case.constant:
                np.testing.assert_array_equal(found_gradients[key], 0, err_msg=key)


@every_case
def test_an_all_zero_mask_gives_0_and_no_gradient(name):
    case = CASES[name]
    gradients, found = program(name)(*nothing(case))
    for part, value in zip(found, case.empty or (0,) * len(found), strict=True):
        np.testing.assert_array_equal(part, np.full(part.shape, value))
    for key in case.learnt + case.constant:
        np.testing.assert_array_equal(gradients[key], 0, err_msg=key)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.alone])
def test_results_over_parts_of_the_rows_add_up(name):
    """Sums over micro-batches, divided by counts of the whole batch, then equal those of the whole batch."""
    case = CASES[name]
    arrays, mask = padded(case, dense(case), 999.0, slice(4, 8), [1, 2, 5])
    gradients, whole = program(name)(arrays, mask)
    halves = []
    for rows in (slice(0, 6), slice(6, 16)):
        half = np.zeros_like(mask)
        half[rows] = mask[rows]
        halves.append(program(name)(arrays, half))
    for i, part in enumerate(whole):
        np.testing.assert_allclose(halves[0][1][i] + halves[1][1][i], part, rtol=1e-6, atol=1e-7)
    for key in case.learnt:
        np.testing.assert_allclose(halves[0][0][key] + halves[1][0][key], gradients[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rank == 2 or not case.alone])
def test_rows_can_be_on_any_devices(name):
    """Rows are split over four devices and tokens over two: sums are global, whatever a device holds."""
    case = CASES[name]
    arrays, mask = padded(case, dense(case), np.nan, slice(4, 8), [1, 2, 5])
    gradients, expected = program(name)(arrays, mask)
    sharding = NamedSharding(make_mesh(2, 2, 2), PartitionSpec(*(("data", "fsdp"), "tensor")[: case.rank]))
    found_gradients, found = program(name)(*jax.device_put((arrays, mask), sharding))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=2e-6)
    for key in case.learnt:
        np.testing.assert_allclose(found_gradients[key], gradients[key], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", CHECKED_HERE)
def test_the_gradient_is_the_finite_difference_in_float64(name):
    case = CASES[name]
    arrays, mask = padded(case, dense(case, 7), 0.3, slice(4, 8), [1, 2, 5])
    with jax.enable_x64(True):
        rest = {key: x for key, x in arrays.items() if key not in case.learnt}

        @jax.jit
        def function(learnt):
            return total(case, learnt | rest, mask)[0]

        learnt = {key: jnp.asarray(arrays[key]) for key in case.learnt}
        assert all(part.dtype == np.float64 for part in jax.eval_shape(lambda x: parts(case, x, mask), arrays))
        check_grads(function, (learnt,), order=1, modes=["rev"])


# Primitives that move data and compute nothing.
MOVES = {"select_n", "broadcast_in_dim", "reshape", "squeeze", "transpose", "concatenate", "stop_gradient", "jit"}


def computed(jaxpr) -> set[tuple[str, Any]]:
    """Return (primitive, dtype) of every step that computes in less than float32."""
    found = set()
    for step in jaxpr.eqns:
        narrow = {x.aval.dtype for x in (*step.invars, *step.outvars) if x.aval.dtype in (jnp.float16, jnp.bfloat16)}
        if step.primitive.name not in (*MOVES, "convert_element_type"):
            found |= {(step.primitive.name, dtype) for dtype in narrow}
        for inner in jax.tree.leaves(step.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                found |= computed(getattr(inner, "jaxpr", inner))
    return found


@every_case
def test_narrow_dtypes_are_computed_in_float32(name):
    case = CASES[name]
    mask = jnp.ones((ROWS, TOKENS)[: case.rank], bool)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.int32, jnp.bool_):
        shapes = {key: jax.ShapeDtypeStruct(x.shape, dtype) for key, x in dense(case).items()}
        traced = jax.make_jaxpr(functools.partial(parts, case))(shapes, mask)
        assert not computed(traced.jaxpr), dtype
        assert all(part.dtype in (jnp.float32, jnp.bool_) for part in traced.out_avals), dtype


@every_case
def test_a_wrong_shape_or_dtype_is_refused_while_tracing(name):
    case = CASES[name]
    arrays = dense(case)
    mask = np.ones((ROWS, TOKENS)[: case.rank], np.float32)
    trace = functools.partial(jax.eval_shape, functools.partial(parts, case))
    for key in (*arrays, "mask"):
        x = mask if key == "mask" else arrays[key]
        longer, column = np.concatenate([x, x]), x[..., None]
        for wrong in (longer, x[:1], column, x[0], x.astype(complex)):
            if not np.ndim(wrong) and key in ("label", "margin"):
                continue  # one number for all is allowed
            if key == "mask":
                if name in ("combine_scores", "broadcast_to_tokens") and wrong is column:
                    continue  # the entry of the table stacks their mask itself
                changed = arrays, wrong
            else:
                changed = {**arrays, key: wrong}, mask
            with pytest.raises(ValueError):
                trace(*changed)
                pytest.fail(f"{key} of shape {wrong.shape} and dtype {wrong.dtype} passes")


@every_case
def test_guards_ignore_masked_values(name):
    """This includes values that are known while tracing: a NaN in a padding row is no error."""
    case = CASES[name]
    for garbage in GARBAGE:
        arrays, mask = padded(case, dense(case), garbage, slice(4, 8), [1, 2, 5])
        found = jax.eval_shape(lambda: parts(case, arrays, mask))  # noqa: B023
        assert jax.tree.leaves(found)


# Each is a function of (beta, label).
SETTINGS = {
    kind: functools.partial(
        lambda beta, label, **options: direct_preference.dpo(*[np.zeros(2)] * 4, beta, label, **options),
        kind=kind, label_smoothing=0.1, chosen_lengths=np.ones(2), rejected_lengths=np.ones(2))
    for kind in direct_preference.DPO_KINDS
} | {
    "mixed_dpo": lambda beta, label: direct_preference.mixed_dpo(*[np.zeros(2)] * 4, {"sigmoid": 1.0}, beta, label),
    "kto": lambda beta, label: kto.kto(np.zeros(2), None, label, 0.0, beta),
    "cpo": lambda beta, label: reference_free.cpo(np.zeros(2), np.zeros(2), beta, label),
    "orpo": lambda beta, label: reference_free.orpo(-np.ones(2), -np.ones(2), beta, label),
    "simpo": lambda beta, label: reference_free.simpo(np.zeros(2), np.zeros(2), beta, 0.5, label),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_beta_not_above_0_and_a_label_outside_0_to_1_are_refused_while_tracing(name):
    call = SETTINGS[name]
    for beta in (0.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="beta is .*; a number above 0 is expected"):
            jax.eval_shape(lambda: call(beta, np.ones(2)))  # noqa: B023
    for label in (-0.1, 1.1, np.nan):
        for shape in ((), (2,)):
            with pytest.raises(ValueError, match=r"(label|desirable) is .*; in \[0, 1\] is expected"):
                jax.eval_shape(lambda: call(0.1, np.full(shape, label)))  # noqa: B023
    jax.eval_shape(call, 0.1, np.ones(2))
