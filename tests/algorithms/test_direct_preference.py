"""DPO and related losses against worked figures, a loop in plain Python for every kind, and finite differences."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxalign.algorithms.direct_preference import DPO_KINDS, bco_baseline, dpo, mixed_dpo, sft_loss
from jaxalign.algorithms.kto import kto, kto_baseline
from jaxalign.algorithms.masked import masked_mean
from jaxalign.algorithms.reference_free import cpo, orpo, simpo

# The worked example: margins 0, 10 and 20.
CHOSEN, REJECTED = np.array([-0.5, -10.0, -1.0]), np.array([-0.1, -30.0, -21.0])
REF_CHOSEN, REF_REJECTED = np.array([-0.5, -10.1, -0.1]), np.array([-0.1, -20.1, -0.1])
WORKED = CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED

NEEDS_SMOOTHING = ("conservative", "robust", "exo_pair")
COUPLED = ("aot", "aot_unpaired")
TAU, SHIFT = 0.2, 0.15


def _settings(kind: str, smoothing: float = 0.0) -> dict:
    """Arguments that a kind needs: its smoothing, its lengths, a baseline, and a tau that is not the default."""
    smoothing = smoothing or (0.1 if kind in NEEDS_SMOOTHING else 0.0)
    return {"kind": kind, "label_smoothing": smoothing, "baseline": SHIFT, "discopop_tau": TAU}


def _case(seed: int, rows: int = 6):
    rng = np.random.default_rng(seed)
    logprobs = -rng.gamma(4.0, 3.0, (4, rows))
    lengths = rng.integers(1, 9, (2, rows))
    label = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], rows)
    return tuple(logprobs), lengths, label, rng.random(rows) < 0.7


# -- The oracle: the loss of one pair in plain Python floats, from the formulas of the papers. --


def _s(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _bce(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(-x, 0)


def _hard(kind: str, a: float, b: float, beta: float, e: float) -> float:
    """The loss with the first response preferred to the second, before smoothing, which is the same for all kinds."""
    h = a - b
    if kind in ("sigmoid", "conservative"):
        return _bce(beta * h)
    if kind == "robust":
        return ((1 - e) * _bce(beta * h) - e * _bce(-beta * h)) / (1 - 2 * e)
    if kind == "hinge":
        return max(0.0, 1 - beta * h)
    if kind in ("ipo", "ipo_mean"):
        return (h - 1 / (2 * beta)) ** 2
    if kind == "nca_pair":
        return _bce(beta * a) + 0.5 * _bce(-beta * a) + 0.5 * _bce(-beta * b)
    if kind == "bco_pair":
        return _bce(beta * a - SHIFT) + _bce(-(beta * b - SHIFT))
    if kind == "apo_zero":
        return (1 - _s(beta * a)) + _s(beta * b)
    if kind == "apo_down":
        return _s(beta * a) + (1 - _s(beta * h))
    if kind == "sppo_hard":
        return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2
    if kind == "discopop":
        w = _s(beta * h / TAU)
        return (1 - w) * _bce(beta * h) + w * math.exp(-beta * h)
    raise AssertionError(kind)


def _soft(kind: str, a: float, b: float, beta: float, e: float, label: float) -> float:
    if kind == "exo_pair":
        target, p = label * (1 - e) + (1 - label) * e, _s(beta * (a - b))
        return p * math.log(p / target) + (1 - p) * math.log((1 - p) / (1 - target))
    flips = 0.0 if kind == "robust" else e
    loss = 0.0
    for share, first, second in ((label, a, b), (1 - label, b, a)):
        loss += share * (1 - flips) * _hard(kind, first, second, beta, e)
        loss += share * flips * _hard(kind, second, first, beta, e)
    return loss


def _transport_total(kind: str, case, beta: float, e: float, label, mask) -> float:
    """Sum over rows, with every quarter of a pair as a separate atom: sort both sides and match them."""
    better, worse = [], []
    for c, r, rc, rr, p, m in zip(*case, label, mask, strict=True):
        orders = (((c - r), (rc - rr)), (-(c - r), -(rc - rr))) if kind == "aot" else ((c - rc, r - rr), (r - rr, c - rc))
        quarters = round(4 * p) if m else 0, round(4 * (1 - p)) if m else 0
        for (x, y), count in zip(orders, quarters, strict=True):
            better += [x] * count
            worse += [y] * count
    violations = [beta * (x - y) for x, y in zip(sorted(better), sorted(worse), strict=True)]
    return sum((1 - e) * _bce(x) + e * _bce(-x) for x in violations) / 4


# -- Worked figures. --


def test_dpo_gives_the_worked_figures():
    loss, stats = dpo(*WORKED, 0.1)
    np.testing.assert_allclose(loss, [0.693147, 0.313262, 0.126928], atol=5e-7)
    np.testing.assert_allclose(stats.margins, [0, 1, 2], atol=1e-6)
    np.testing.assert_allclose(stats.chosen_rewards, [0, 0.01, -0.09], atol=1e-6)
    np.testing.assert_allclose(stats.rejected_rewards, [0, -0.99, -2.09], atol=1e-6)


@pytest.mark.parametrize("kind", ["conservative", "sigmoid"])
def test_conservative_dpo_gives_the_worked_figures(kind):
    smoothed, _ = dpo(*WORKED, 0.1, kind=kind, label_smoothing=0.1)
    np.testing.assert_allclose(smoothed, [0.693147, 0.413262, 0.326928], atol=5e-7)
    # Equal to a soft label of .9.
    np.testing.assert_allclose(dpo(*WORKED, 0.1, label=0.9)[0], [0.693147, 0.413262, 0.326928], atol=5e-7)


def test_hinge_and_ipo_give_the_worked_figures():
    np.testing.assert_allclose(dpo(*WORKED, 0.1, kind="hinge")[0], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(dpo(*WORKED, 0.1, kind="ipo")[0], [25, 25, 225], rtol=1e-6)
    # Averaged over 2 and 4 tokens: log-ratios 0, .05 and -.45 minus 0, -2.475 and -5.225; subtract 5 from each difference.
    lengths = {"chosen_lengths": np.full(3, 2), "rejected_lengths": np.full(3, 4)}
    mean, _ = dpo(*WORKED, 0.1, kind="ipo_mean", **lengths)
    np.testing.assert_allclose(mean, [25, (2.525 - 5) ** 2, (4.775 - 5) ** 2], rtol=1e-5)


def test_robust_dpo_by_hand():
    # ((1 - .1) f(m) - .1 f(-m)) / .8 with f(-m) = f(m) + m: f(m) - m / 8.
    robust, _ = dpo(*WORKED, 0.1, kind="robust", label_smoothing=0.1)
    np.testing.assert_allclose(robust, [0.693147, 0.313262 - 0.125, 0.126928 - 0.25], atol=1e-6)


def test_the_other_kinds_by_hand():
    # Log-ratios (0, 0), (.1, -9.9), (-.9, -20.9); 1 / (2 beta) is 5.
    np.testing.assert_allclose(dpo(*WORKED, 0.1, kind="sppo_hard")[0], [50, 4.9**2 + 4.9**2, 5.9**2 + 15.9**2], rtol=1e-5)
    np.testing.assert_allclose(
        dpo(*WORKED, 0.1, kind="apo_zero")[0],
        [1, 1 - _s(0.01) + _s(-0.99), 1 - _s(-0.09) + _s(-2.09)],
        rtol=1e-6,
    )
    # Sorted, the policy's margins -.4, 20, 20 are matched with the reference's -.4, 0, 10, instead of row by row.
    np.testing.assert_allclose(dpo(*WORKED, 0.1, kind="aot")[0], [_bce(0.0), _bce(2.0), _bce(1.0)], rtol=1e-5)
    np.testing.assert_allclose(dpo(*WORKED, 0.1, kind="discopop")[0][0], 0.5 * math.log(2) + 0.5, rtol=1e-6)


def test_simpo_gives_the_worked_figures():
    loss, stats = simpo(CHOSEN, REJECTED, beta=2.0, gamma=0.5)
    np.testing.assert_allclose(loss, [1.541008, 0, 0], atol=5e-7)
    np.testing.assert_allclose(stats.margins, [-0.8, 40, 40], rtol=1e-6)


def test_kto_gives_the_worked_figures():
    desirable, rewards = kto(CHOSEN, REF_CHOSEN, np.ones(3, bool), 0.0, 0.1)
    np.testing.assert_allclose(desirable, [0.5, 0.49750, 0.52248], atol=5e-6)
    np.testing.assert_allclose(rewards, [0, 0.01, -0.09], atol=1e-6)
    undesirable, _ = kto(REJECTED, REF_REJECTED, np.zeros(3, bool), 0.0, 0.1)
    np.testing.assert_allclose(undesirable, [0.5, 0.27091, 0.11007], atol=5e-6)


def test_orpo_gives_the_worked_figures():
    loss, stats = orpo(np.array([-0.5, -1.0, -0.2]), np.array([-0.7, -0.3, -2.0]))
    np.testing.assert_allclose(loss, [0.49464784, 1.77687557, 0.03406653], rtol=1e-6)
    # odds(e^-.5) = .60653 / .39347
    assert float(stats.chosen_rewards[0]) == pytest.approx(math.log(0.60653066 / 0.39346934), abs=1e-6)


# -- Every kind against the oracle. --


@functools.partial(jax.jit, static_argnames="kind")
def _jitted(case, lengths, label, mask, beta, smoothing, kind):
    settings = _settings(kind) | {"label_smoothing": smoothing}
    return dpo(*case, beta, label, chosen_lengths=lengths[0], rejected_lengths=lengths[1], mask=mask, **settings)


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), smoothing=st.sampled_from([0.0, 0.2]), beta=st.sampled_from([0.05, 0.3]))
def test_every_kind_equals_a_loop_under_soft_labels_and_masks(seed, smoothing, beta):
    case, lengths, label, mask = _case(seed)
    spoilt = tuple(np.where(mask, x, np.nan) for x in case)
    for kind in DPO_KINDS:
        e = _settings(kind, smoothing)["label_smoothing"]
        loss, stats = _jitted(spoilt, np.where(mask, lengths, -1), np.where(mask, label, 7), mask, beta, e, kind)
        a, b = case[0] - case[2], case[1] - case[3]
        if kind == "ipo_mean":
            a, b = a / lengths[0], b / lengths[1]
        if kind in COUPLED:
            expected = _transport_total(kind, case, beta, e, label, mask)
            np.testing.assert_allclose(np.sum(loss), expected, rtol=2e-5, atol=1e-5, err_msg=kind)
            np.testing.assert_array_equal(np.asarray(loss)[~mask], 0)
        else:
            expected = [m and _soft(kind, x, y, beta, e, p) for x, y, p, m in zip(a, b, label, mask, strict=True)]
            np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-5, err_msg=kind)
        np.testing.assert_allclose(stats.chosen_rewards, np.where(mask, beta * a, 0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stats.margins, np.where(mask, beta * (a - b), 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_swapping_the_pair_and_its_label_changes_nothing(kind):
    (c, r, rc, rr), lengths, label, _ = _case(3)
    turned = {"chosen_lengths": lengths[1], "rejected_lengths": lengths[0], **_settings(kind)}
    straight = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], **_settings(kind)}
    loss, stats = dpo(c, r, rc, rr, 0.1, label, **straight)
    other, other_stats = dpo(r, c, rr, rc, 0.1, 1 - label, **turned)
    np.testing.assert_allclose(other, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_stats.margins, -stats.margins, rtol=1e-6)


def test_a_hard_label_gives_the_hard_loss_and_a_soft_label_a_mixture():
    (c, r, rc, rr), lengths, label, _ = _case(4)
    for kind in DPO_KINDS:
        options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[0], **_settings(kind)}
        first, second, soft = (dpo(c, r, rc, rr, 0.1, x, **options)[0] for x in (1.0, 0.0, label))
        np.testing.assert_array_equal(dpo(c, r, rc, rr, 0.1, **options)[0], first)
        np.testing.assert_array_equal(dpo(c, r, rc, rr, 0.1, np.ones(6, int), **options)[0], first)
        if kind not in (*COUPLED, "exo_pair"):
            np.testing.assert_allclose(soft, label * first + (1 - label) * second, rtol=1e-5, atol=1e-6, err_msg=kind)


def _least_margin(kind: str, **options) -> float:
    """beta h at the minimum of the loss, on a grid: the first log-ratio goes from -6 / beta to 6 / beta, the second is 0."""
    ratio = np.linspace(-60, 60, 4801)
    loss, _ = dpo(ratio, np.zeros(4801), None, None, 0.1, kind=kind, **options)
    return 0.1 * ratio[int(np.argmin(loss))]


@pytest.mark.parametrize("kind, smoothing", [("sigmoid", 0.0), ("conservative", 0.1), ("robust", 0.1), ("exo_pair", 0.1)])
def test_the_probability_at_the_minimum_is_the_smoothed_label(kind, smoothing):
    # With flips of 10% a label of .75 becomes .7, and "robust" reverses the flips.
    target = (0.75 - smoothing) / (1 - 2 * smoothing) if kind == "robust" else 0.75 + smoothing * (1 - 2 * 0.75)
    assert _least_margin(kind, label=0.75, label_smoothing=smoothing) == pytest.approx(
        math.log(target / (1 - target)), abs=3e-3
    )


@pytest.mark.parametrize("kind", ["ipo", "sppo_hard"])
def test_the_quadratic_kinds_regress_on_the_label(kind):
    # d/dh of the mixture equals that of (h - (2 label - 1) / (2 beta))^2: 0 at beta h = .25 for a label of .75.
    assert _least_margin(kind, label=0.75) == pytest.approx(0.25, abs=3e-3)


# -- The reference. --


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_without_a_reference_its_log_probs_are_0(kind):
    (c, r, _, _), lengths, label, _ = _case(5)
    options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], **_settings(kind)}
    free, _ = dpo(c, r, None, None, 0.1, label, **options)
    np.testing.assert_array_equal(free, dpo(c, r, np.zeros(6), np.zeros(6), 0.1, label, **options)[0])


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_reference_and_label_have_no_gradient(kind):
    (c, r, rc, rr), lengths, label, _ = _case(6)
    options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], **_settings(kind)}

    def total(rc, rr, label):
        return dpo(c, r, rc, rr, 0.1, label, **options)[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1, 2))(rc, rr, label):
        np.testing.assert_array_equal(gradient, np.zeros(6))


def test_equal_policy_and_reference_give_the_loss_of_even_odds():
    # If policy and reference are equal, every implicit reward is 0, whatever the responses.
    (c, r, _, _), lengths, _, _ = _case(7)
    expected = {"hinge": 1.0, "ipo": 25.0, "apo_zero": 1.0, "nca_pair": 2 * math.log(2), "aot_unpaired": math.log(2)}
    for kind, value in {"sigmoid": math.log(2), "aot": math.log(2), **expected}.items():
        loss, stats = dpo(c, r, c, r, 0.1, kind=kind)
        np.testing.assert_allclose(loss, np.full(6, value), rtol=1e-6)
        np.testing.assert_array_equal(stats.margins, np.zeros(6))


# -- Gradients. --


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_the_gradient_is_the_finite_difference(kind):
    with jax.enable_x64(True):
        case, lengths, label, mask = _case(11)
        options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], "mask": mask, **_settings(kind)}

        @jax.jit
        def loss(c, r):
            return dpo(c, r, case[2], case[3], 0.1, label, **options)[0]

        assert loss(case[0], case[1]).dtype == np.float64
        # The hinge has kinks at margins of +-10, and the transport where two quantiles meet: both are far away here.
        check_grads(loss, case[:2], order=1, modes=["rev"])


def test_the_gradient_of_dpo_equals_that_of_the_paper():
    # d loss / d chosen = -beta sigmoid(-margin), the gradient in equation 7.
    gradient = jax.grad(lambda c: dpo(c, REJECTED, REF_CHOSEN, REF_REJECTED, 0.1)[0].sum())(jnp.asarray(CHOSEN))
    np.testing.assert_allclose(gradient, [-0.1 * _s(-m) for m in (0.0, 1.0, 2.0)], rtol=1e-5)


@pytest.mark.medium
def test_the_gradients_of_the_others_are_finite_differences():
    with jax.enable_x64(True):
        c, r = np.array([-0.5, -1.3, -0.02, -0.6931]), np.array([-0.7, -0.3, -2.0, -9.0])
        label, mask, nll = np.array([1.0, 0.3, 0.0, 0.8]), np.array([1, 1, 1, 0]), np.ones(4)
        check_grads(jax.jit(lambda c, r: orpo(c, r, 0.3, label, nll, mask)[0]), (c, r), order=1, modes=["rev"])
        check_grads(jax.jit(lambda c, r: orpo(c, r)[0]), (c, r), order=1, modes=["rev"])
        check_grads(jax.jit(lambda c, r: simpo(c, r, 2.0, 0.5, label, mask)[0]), (c, r), order=1, modes=["rev"])
        check_grads(
            jax.jit(lambda c, r: cpo(c, r, 0.1, label, sft_loss(c, r, label), 0.5, mask)[0]), (c, r), order=1, modes=["rev"]
        )
        check_grads(jax.jit(lambda c: kto(c, r, label, 0.4, 0.1, 1.3, 0.7, mask)[0]), (c,), order=1, modes=["rev"])
        assert orpo(c, r)[0].dtype == kto(c, r, label, 0.4)[0].dtype == np.float64


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_large_margins_stay_finite_with_their_gradient(kind):
    logprobs = np.array([-1000.0, 1e-3, 5000.0]), np.array([3000.0, -4000.0, 5000.0])
    options = {"chosen_lengths": np.ones(3), "rejected_lengths": np.ones(3), **_settings(kind)}
    for label in (1.0, 0.0, 0.5):
        value, gradient = jax.value_and_grad(lambda c, y=label: dpo(c, logprobs[1], None, None, 1.0, y, **options)[0].sum())(
            jnp.asarray(logprobs[0])
        )
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_a_response_impossible_under_the_policy_gives_no_nan():
    chosen, rejected = jnp.array([-3.0, -3.0, -3.0]), jnp.array([-jnp.inf, -4.0, -jnp.inf])
    value, gradient = jax.value_and_grad(lambda c: dpo(c, rejected, None, None, 0.1)[0].sum())(chosen)
    assert float(value) == pytest.approx(_bce(0.1), rel=1e-6)
    assert np.isfinite(gradient).all()


# -- Padding rows, and parts of a batch. --


@functools.partial(jax.jit, static_argnames="kind")
def _padded_gradient(case, lengths, label, mask, kind):
    """Return (gradient with respect to the first response's log-probabilities, loss)."""
    options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], **_settings(kind), "baseline": None}

    def total(chosen):
        loss, _ = dpo(chosen, *case[1:], 0.1, label, mask=mask, **options)
        return loss.sum(), loss

    return jax.grad(total, has_aux=True)(case[0])


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_masked_rows_change_nothing_on_either_side(kind):
    case, lengths, label, _ = _case(8, rows=3)
    options = _settings(kind) | {"baseline": None}
    alone, _ = dpo(*case, 0.1, label, chosen_lengths=lengths[0], rejected_lengths=lengths[1], **options)
    for before, garbage in itertools.product((0, 3), (999.0, np.inf, np.nan)):
        place = (before, 3 - before)
        padded = [np.pad(np.asarray(x, float), place, constant_values=garbage) for x in (*case, *lengths, label)]
        inputs, mask = (padded[:4], padded[4:6], padded[6]), np.pad(np.ones(3), place)
        gradient, loss = (np.asarray(x) for x in _padded_gradient(*inputs, mask, kind))
        np.testing.assert_allclose(loss, np.pad(alone, place), rtol=1e-5, atol=1e-6)
        assert np.isfinite(gradient).all() and not gradient[mask == 0].any() and gradient[mask == 1].any()
        nothing = _padded_gradient(*inputs, np.zeros(6), kind)
        np.testing.assert_array_equal(nothing, np.zeros((2, 6)))


@pytest.mark.parametrize("kind", [kind for kind in DPO_KINDS if kind not in COUPLED])
def test_micro_batches_add_up(kind):
    case, lengths, label, mask = _case(9)
    shift = bco_baseline(*case, 0.1, mask)

    def part(rows, baseline=shift):
        options = {"chosen_lengths": lengths[0][rows], "rejected_lengths": lengths[1][rows], "mask": mask[rows]}
        return dpo(*(x[rows] for x in case), 0.1, label[rows], **_settings(kind) | options | {"baseline": baseline})[0]

    whole, first, second = part(slice(None)), part(slice(0, 3)), part(slice(3, 6))
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-6)
    assert (first.sum() + second.sum()) / mask.sum() == pytest.approx(float(masked_mean(whole, mask)), rel=1e-5)
    # By default "bco_pair" uses the baseline of the whole batch.
    np.testing.assert_allclose(part(slice(None), baseline=None), whole, rtol=1e-6)


def test_the_other_losses_ignore_padding():
    spoilt, mask = np.array([-0.5, np.nan, np.inf]), np.array([1, 0, 0])
    clean = np.full(3, -0.5)
    calls = {
        "cpo": lambda x, m=None: cpo(x, 2 * x, 0.1, nll=-x, mask=m)[0],
        "orpo": lambda x, m=None: orpo(x, 2 * x, 0.1, nll=-x, mask=m)[0],
        "simpo": lambda x, m=None: simpo(x, 2 * x, mask=m)[0],
        "kto": lambda x, m=None: kto(x, 2 * x, jnp.ones_like(x), 0.2, mask=m)[0],
        "sft": lambda x, m=None: sft_loss(x, 2 * x, mask=m),
    }
    for name, call in calls.items():
        np.testing.assert_allclose(call(spoilt, mask), [call(clean)[0], 0, 0], rtol=1e-6, err_msg=name)
        gradient = jax.grad(lambda x, f=call: f(x, mask).sum())(jnp.asarray(spoilt))
        assert np.isfinite(gradient).all() and not gradient[1:].any() and gradient[0] != 0, name
        np.testing.assert_array_equal(call(spoilt, np.zeros(3)), np.zeros(3))


def test_an_all_zero_mask_leaves_both_baselines_at_0():
    nothing = np.full(3, np.nan), np.zeros(3)
    assert float(kto_baseline(nothing[0], nothing[0], nothing[1])) == 0
    assert float(bco_baseline(*[nothing[0]] * 4, 0.1, nothing[1])) == 0


# -- Mixing, SFT and the other losses. --


def test_mixing_is_a_weighted_sum():
    case, lengths, label, mask = _case(10)
    options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1], "mask": mask}
    mixed, stats = mixed_dpo(*case, {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 0.5}, 0.1, label, **options)
    expected = np.zeros(6)
    shift = 0.1 * np.mean(np.concatenate([(case[0] - case[2])[mask], (case[1] - case[3])[mask]]))
    for i in np.flatnonzero(mask):
        a, b, p = case[0][i] - case[2][i], case[1][i] - case[3][i], label[i]
        expected[i] += 0.8 * (p * _bce(0.1 * (a - b)) + (1 - p) * _bce(0.1 * (b - a)))
        for share, x, y in ((p, a, b), (1 - p, b, a)):
            expected[i] += 0.2 * share * (_bce(0.1 * x - shift) + _bce(shift - 0.1 * y))
        expected[i] += 0.5 * -(p * case[0][i] / lengths[0][i] + (1 - p) * case[1][i] / lengths[1][i])
    np.testing.assert_allclose(mixed, expected, rtol=1e-5)
    np.testing.assert_allclose(stats.margins, np.where(mask, 0.1 * (case[0] - case[2] - case[1] + case[3]), 0), rtol=1e-5)
    np.testing.assert_array_equal(mixed_dpo(*case, {"ipo": 1.0}, 0.1)[0], dpo(*case, 0.1, kind="ipo")[0])


def test_the_sft_term_trains_the_better_response():
    c, r = np.array([-1.0, -1.0, -1.0]), np.array([-3.0, -3.0, -np.inf])
    np.testing.assert_allclose(sft_loss(c, r, np.array([1.0, 0.25, 1.0])), [1, 2.5, 1])


def test_cpo_and_orpo_with_their_nll_by_hand():
    loss, stats = cpo(CHOSEN, REJECTED, 0.1, nll=sft_loss(CHOSEN, REJECTED), nll_coef=0.5)
    np.testing.assert_allclose(loss, [_bce(-0.04) + 0.25, _bce(2.0) + 5, _bce(2.0) + 0.5], rtol=1e-5)
    np.testing.assert_allclose(stats.margins, [-0.04, 2, 2], rtol=1e-5)
    c, r = np.array([-0.5, -1.0, -0.2]), np.array([-0.7, -0.3, -2.0])
    loss, _ = orpo(c, r, 0.1, nll=sft_loss(c, r))
    np.testing.assert_allclose(loss, [0.5 + 0.049464784, 1 + 0.177687557, 0.2 + 0.003406653], rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_others_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    c, r = -rng.gamma(1.5, 0.7, (2, 6)) - 1e-3
    label, mask = rng.random(6), rng.random(6) < 0.7
    kl = rng.random()
    expected = {name: np.zeros(6) for name in ("simpo", "orpo", "cpo", "kto")}
    for i in np.flatnonzero(mask):
        x, y, p = c[i], r[i], label[i]
        expected["simpo"][i] = p * _bce(2 * (x - y) - 0.3) + (1 - p) * _bce(2 * (y - x) - 0.3)
        odds = [math.exp(z) / (1 - math.exp(z)) for z in (x, y)]
        expected["orpo"][i] = -0.5 * (p * math.log(odds[0] / sum(odds)) + (1 - p) * math.log(odds[1] / sum(odds)))
        expected["cpo"][i] = p * _bce(0.1 * (x - y)) + (1 - p) * _bce(0.1 * (y - x))
        gain = 0.1 * (x - y - kl)
        expected["kto"][i] = p * 1.3 * (1 - _s(gain)) + (1 - p) * 0.7 * (1 - _s(-gain))
    found = {
        "simpo": simpo(c, r, 2.0, 0.3, label, mask)[0],
        "orpo": orpo(c, r, 0.5, label, mask=mask)[0],
        "cpo": cpo(c, r, 0.1, label, mask=mask)[0],
        "kto": kto(c, r, label, kl, 0.1, 1.3, 0.7, mask)[0],
    }
    for name, loss in found.items():
        np.testing.assert_allclose(loss, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_baselines_and_the_sft_term_equal_a_loop(seed):
    (c, r, rc, rr), _, label, mask = _case(seed)
    rows = np.flatnonzero(mask)
    spoilt = [np.where(mask, x, np.nan) for x in (c, r, rc, rr)]
    ratios = [c[i] - rc[i] for i in rows] + [r[i] - rr[i] for i in rows]
    mean = sum(ratios) / len(ratios) if ratios else 0
    assert float(bco_baseline(*spoilt, 0.3, mask)) == pytest.approx(0.3 * mean, rel=1e-4, abs=1e-5)
    other = sum(r[i] - rr[i] for i in rows) / max(len(rows), 1)
    assert float(kto_baseline(spoilt[1], spoilt[3], mask)) == pytest.approx(max(other, 0), rel=1e-4, abs=1e-5)
    expected = np.zeros(6)
    for i in rows:
        expected[i] = -label[i] * c[i] - (1 - label[i]) * r[i]
    np.testing.assert_allclose(sft_loss(spoilt[0], spoilt[1], label, mask), expected, rtol=1e-5)


def test_odds_are_exact_at_both_ends_and_finite_at_probability_1():
    x = np.array([-1e-6, -1e-3, -0.69, -0.70, -5.0, -80.0])
    _, stats = orpo(x, x)
    expected = [-math.log(math.expm1(-v)) for v in x]
    np.testing.assert_allclose(stats.chosen_rewards, expected, rtol=1e-5, atol=1e-6)
    value, gradient = jax.value_and_grad(lambda c: orpo(c, jnp.full(3, -1.0))[0].sum())(jnp.array([0.0, -1e-9, -1.0]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_kto_has_no_gradient_through_its_reference_point():
    def loss(kl, ref):
        return kto(CHOSEN, ref, np.ones(3), kl)[0].sum()

    for gradient in jax.grad(loss, argnums=(0, 1))(0.3, jnp.asarray(REF_CHOSEN)):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    baseline = jax.grad(lambda x: kto_baseline(x, REF_CHOSEN))(jnp.asarray(CHOSEN) + 5)
    np.testing.assert_array_equal(baseline, np.zeros(3))


def test_kto_baseline_by_hand_and_never_negative():
    # Log-ratios 1 and 3 and a padding row: 2. With the signs reversed: -2, clipped to 0.
    policy, ref = np.array([-1.0, -2.0, np.nan]), np.array([-2.0, -5.0, np.inf])
    assert float(kto_baseline(policy, ref, np.array([1, 1, 0]))) == pytest.approx(2)
    assert float(kto_baseline(ref, policy, np.array([1, 1, 0]))) == 0
    assert float(kto_baseline(np.array([1.0, 3.0]), None)) == pytest.approx(2)


def test_kto_weights_the_two_sides():
    loss, _ = kto(np.zeros(2), np.zeros(2), np.array([1, 0]), 0.0, 0.1, 3.0, 5.0)
    np.testing.assert_allclose(loss, [1.5, 2.5])
    # Above the reference point a desirable response costs less than half its weight, and an undesirable one more.
    loss, _ = kto(np.full(2, 9.0), np.zeros(2), np.array([True, False]), 4.0, 0.2)
    np.testing.assert_allclose(loss, [1 - _s(1.0), _s(1.0)], rtol=1e-6)


def test_narrow_dtypes_are_widened():
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in WORKED]
    wide = [np.asarray(x, np.float32) for x in narrow]
    loss, _ = dpo(*narrow, 0.1)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, dpo(*wide, 0.1)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"beta": 0.0}, "beta is 0.0; a number above 0"),
        ({"beta": np.ones(3)}, "beta has shape"),
        ({"label": 1.5}, r"label is 1.5; in \[0, 1\]"),
        ({"label": np.array([1.0, -1.0, 1.0])}, r"label is -1.0; in \[0, 1\]"),
        ({"label": np.ones(2)}, r"label has shape \(2,\); \[B\] = \(3,\)"),
        ({"label": np.nan}, "label is nan"),
        ({"kind": "dpo"}, "kind is 'dpo'; one of sigmoid"),
        ({"label_smoothing": 0.5}, "0.5 - label_smoothing is 0.0; a number above 0"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; at least 0"),
        ({"kind": "conservative"}, "label_smoothing, which 'conservative' needs, is 0.0; a number above 0"),
        ({"kind": "robust"}, "which 'robust' needs"),
        ({"kind": "exo_pair"}, "which 'exo_pair' needs"),
        ({"kind": "ipo_mean"}, "chosen_lengths is None; 'ipo_mean' averages"),
        ({"kind": "ipo_mean", "chosen_lengths": np.ones(3)}, "rejected_lengths is None"),
        ({"kind": "bco_pair", "baseline": np.zeros(3)}, "baseline has shape"),
        ({"kind": "discopop", "discopop_tau": 0.0}, "discopop_tau is 0.0; a number above 0"),
        ({"kind": "discopop", "discopop_tau": 1.0}, "1 - discopop_tau is 0.0; a number above 0"),
        ({"mask": np.ones(2)}, r"the same shape: chosen_logprobs \(3,\).*mask \(2,\)"),
    ],
)
def test_bad_settings_of_dpo_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dpo(*WORKED, **options)


def test_shapes_are_refused_at_trace_time():
    with pytest.raises(ValueError, match="these must have the same shape: chosen_logprobs"):
        jax.eval_shape(dpo, CHOSEN, REJECTED[:2], REF_CHOSEN, REF_REJECTED)
    with pytest.raises(ValueError, match=r"chosen_logprobs has shape \(3, 1\); \[B\]"):
        dpo(*(x[:, None] for x in WORKED))
    with pytest.raises(ValueError, match="ref_rejected_logprobs is None; give both"):
        dpo(CHOSEN, REJECTED, REF_CHOSEN, None)


def test_known_values_are_refused_at_trace_time():
    for function, message in (
        (lambda x: dpo(x, x, x, x, 0.1, np.array([2.0, 1.0, 0.0])), "label is 2.0"),
        (lambda x: dpo(x, x, x, x, -0.1), "beta is -0.1; a number above 0"),
        (lambda x: kto(x, x, np.array([1.0, -1.0, 0.0]), 0.0), "desirable is -1.0"),
        (lambda x: orpo(x, -CHOSEN), r"rejected_avg_logprobs is 0.5; in \[-inf, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(function, CHOSEN)


def test_bad_settings_of_the_others_are_refused():
    with pytest.raises(ValueError, match="weights is empty; at least one of sigmoid"):
        mixed_dpo(*WORKED, {})
    with pytest.raises(ValueError, match="a name in weights is 'dpo'; one of sigmoid"):
        mixed_dpo(*WORKED, {"dpo": 1.0})
    with pytest.raises(ValueError, match=r"weights\['ipo'\] is -1.0; at least 0"):
        mixed_dpo(*WORKED, {"ipo": -1.0})
    with pytest.raises(ValueError, match="chosen_lengths is None; 'sft'"):
        mixed_dpo(*WORKED, {"sft": 1.0})
    with pytest.raises(ValueError, match=r"chosen_avg_logprobs is 0.5; in \[-inf, 0\]"):
        orpo(np.array([0.5]), np.array([-0.5]))
    with pytest.raises(ValueError, match=r"the same shape: chosen_avg_logprobs \(3,\), rejected_avg_logprobs \(2,\)"):
        simpo(CHOSEN, REJECTED[:2])
    with pytest.raises(ValueError, match="gamma is -0.5; at least 0"):
        simpo(CHOSEN, REJECTED, 2.0, -0.5)
    with pytest.raises(ValueError, match=r"the same shape: loss \(3,\), nll \(1,\)"):
        cpo(CHOSEN, REJECTED, nll=np.ones(1))
    with pytest.raises(ValueError, match="nll_coef is -1; at least 0"):
        cpo(CHOSEN, REJECTED, nll=np.ones(3), nll_coef=-1)
    with pytest.raises(ValueError, match=r"desirable is 2.0; in \[0, 1\]"):
        kto(CHOSEN, REF_CHOSEN, np.full(3, 2.0), 0.0)
    with pytest.raises(ValueError, match="undesirable_weight is -1.0; at least 0"):
        kto(CHOSEN, REF_CHOSEN, np.ones(3), 0.0, undesirable_weight=-1.0)
    with pytest.raises(ValueError, match="kl has shape"):
        kto(CHOSEN, REF_CHOSEN, np.ones(3), np.zeros(3))
    for function in (simpo, orpo, cpo):
        with pytest.raises(ValueError, match="beta is 0.0; a number above 0"):
            function(CHOSEN, REJECTED, beta=0.0)
