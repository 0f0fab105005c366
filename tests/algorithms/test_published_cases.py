"""Results of other implementations: values from the tests of rlax, and values computed with TRL 1.16.0.

TRL's numbers come from its own loss functions (DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer._compute_loss,
CPOTrainer.cpo_loss, ORPOTrainer.odds_ratio_loss and the advantage code of the others), in float64, with the
log-probabilities below instead of a model's. Tests state where TRL's default differs from ours.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.algorithms.advantages import discounted_returns, gae, lambda_returns
from jaxalign.algorithms.direct_preference import dpo
from jaxalign.algorithms.groups import broadcast_to_tokens, grpo, rloo
from jaxalign.algorithms.kl import kl_loss
from jaxalign.algorithms.kto import kto, kto_baseline
from jaxalign.algorithms.masked import aggregate
from jaxalign.algorithms.policy_losses import cispo, clipped_surrogate, gspo, policy_gradient
from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.algorithms.reference_free import cpo, orpo, simpo

# -- rlax: two rows, with an episode that ends within the second. --

STEPS = np.array([[0.0, 0.0, 1.0, 0.0, -0.5], [0.0, 0.0, 0.0, 0.0, 1.0]])
DISCOUNTS = np.array([[0.99, 0.99, 0.99, 0.99, 0.99], [0.9, 0.9, 0.9, 0.0, 0.9]])
VALUES = np.array([[1.0, 4.0, -3.0, -2.0, -1.0, -1.0], [-3.0, -2.0, -1.0, 0.0, 5.0, -1.0]])


@pytest.mark.parametrize(
    "lam, expected",
    [
        (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]]),
        (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]]),
        (0.4, [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]]),
    ],
)
def test_rlax_advantages(lam, expected):
    found, _ = gae(STEPS, VALUES[:, :-1], np.ones((2, 5)), DISCOUNTS, lam, VALUES[:, -1])
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_rlax_returns():
    rewards = np.array([[1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.8, -0.7, 0.0, 2.1]])
    discounts = np.array([[0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]])
    ahead = np.array([[3.0, 1.0, 5.0, -5.0, 3.0], [-1.7, 1.2, 2.3, 2.2, 2.7]])
    mixed = [[1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4], [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]]
    plain = [[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]]
    np.testing.assert_allclose(lambda_returns(rewards, ahead, np.ones((2, 5)), discounts, 0.75), mixed, rtol=1e-6)
    np.testing.assert_allclose(discounted_returns(rewards, np.ones((2, 5)), discounts, ahead[:, -1]), plain, rtol=1e-6)


# -- TRL: four pairs, summed log-probabilities and lengths. --

CHOSEN, REJECTED = np.array([-3.1, -7.4, -2.2, -5.0]), np.array([-4.0, -6.1, -9.3, -5.5])
REF_CHOSEN, REF_REJECTED = np.array([-3.6, -6.8, -2.9, -4.1]), np.array([-3.3, -6.6, -7.0, -5.9])
LENGTHS = {"chosen_lengths": np.array([3, 5, 2, 4]), "rejected_lengths": np.array([4, 3, 6, 5])}
MEAN_CHOSEN, MEAN_REJECTED = CHOSEN / LENGTHS["chosen_lengths"], REJECTED / LENGTHS["rejected_lengths"]

# Loss, and its derivatives with respect to the summed log-probabilities of the chosen and the rejected response; beta .3.
PAIRS = {
    "sigmoid": ([0.52926, 0.871698, 0.341154, 0.90704], [-0.123288, -0.174528, -0.086715, -0.178885],
                [0.123288, 0.174528, 0.086715, 0.178885]),
    "hinge": ([0.64, 1.33, 0.1, 1.39], [-0.3, -0.3, -0.3, -0.3], [0.3, 0.3, 0.3, 0.3]),
    # TRL's "ipo" is the mean per token; the sum, as in the paper, is our "ipo".
    "ipo_mean": ([1.755625, 3.815511, 0.871111, 3.887469], [-0.883333, -0.781333, -0.933333, -0.985833],
                 [0.6625, 1.302222, 0.311111, 0.788667]),
    "exo_pair": ([0.331125, 0.703899, 0.13917, 0.741037], [-0.133422, -0.184474, -0.079974, -0.186846],
                 [0.133422, 0.184474, 0.079974, 0.186846]),
    "nca_pair": ([1.30326, 1.476266, 1.198732, 1.498321], [-0.058157, -0.095196, -0.051461, -0.105192],
                 [0.067154, 0.080614, 0.050105, 0.079495]),
    "robust": ([0.48426, 0.912948, 0.228654, 0.95579], [-0.160788, -0.212028, -0.124215, -0.216385],
               [0.160788, 0.212028, 0.124215, 0.216385]),
    # TRL omits the reward shift of the paper's section 3.3, which is our default.
    "bco_pair": ([1.214607, 1.558149, 1.000165, 1.592178], [-0.138771, -0.163464, -0.134308, -0.170128],
                 [0.134308, 0.161229, 0.10021, 0.158989]),
    "sppo_hard": ([2.295556, 9.832222, 1.335556, 10.858889], [-2.333333, -4.533333, -1.933333, -5.133333],
                  [1.933333, 4.333333, -1.266667, 4.133333]),
    "apo_zero": ([0.910262, 1.082309, 0.781725, 1.097057], [-0.07458, -0.074396, -0.074179, -0.07365],
                 [0.074179, 0.07458, 0.066736, 0.074731]),
    "apo_down": ([0.948389, 1.03688, 0.841358, 1.02919], [0.001958, 0.001401, 0.012529, 0.001431],
                 [0.072622, 0.072995, 0.06165, 0.072219]),
    "discopop": ([0.697551, 0.872404, 0.40657, 0.907274], [-0.208485, -0.170631, -0.121971, -0.177593],
                 [0.208485, 0.170631, 0.121971, 0.177593]),
}
# For the whole batch: the mean loss and its derivatives, with label smoothing 0 and .1.
COUPLED = {
    ("aot", 0.0): (0.656598, [-0.042532, -0.043083, -0.021679, -0.033577], [0.042532, 0.043083, 0.021679, 0.033577]),
    ("aot", 0.1): (0.670098, [-0.035032, -0.035583, -0.014179, -0.026077], [0.035032, 0.035583, 0.014179, 0.026077]),
    ("aot_unpaired", 0.0): (0.631288, [-0.036938, -0.036938, -0.036375, -0.029739],
                            [0.036938, 0.036375, 0.029739, 0.036938]),
    ("aot_unpaired", 0.1): (0.644788, [-0.029438, -0.029438, -0.028875, -0.022239],
                            [0.029438, 0.028875, 0.022239, 0.029438]),
}


@functools.partial(jax.jit, static_argnames=("kind", "smoothing"))
def _pairs(chosen, rejected, kind, smoothing):
    def total(chosen, rejected):
        options = {"kind": kind, "label_smoothing": smoothing, "baseline": 0.0, "discopop_tau": 0.05, **LENGTHS}
        loss, _ = dpo(chosen, rejected, REF_CHOSEN, REF_REJECTED, 0.3, **options)
        return loss.sum(), loss

    return jax.grad(total, argnums=(0, 1), has_aux=True)(chosen, rejected)


@pytest.mark.parametrize("kind", PAIRS)
def test_trl_pairs(kind):
    (by_chosen, by_rejected), loss = _pairs(CHOSEN, REJECTED, kind, 0.1 if kind in ("robust", "exo_pair") else 0.0)
    expected = tuple(map(np.asarray, PAIRS[kind]))
    chex.assert_trees_all_close((loss, by_chosen, by_rejected), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind, smoothing", COUPLED)
def test_trl_optimal_transport(kind, smoothing):
    (by_chosen, by_rejected), loss = _pairs(CHOSEN, REJECTED, kind, smoothing)
    expected = COUPLED[kind, smoothing]
    assert float(loss.mean()) == pytest.approx(expected[0], abs=2e-6)
    np.testing.assert_allclose(by_chosen / 4, expected[1], atol=2e-6)
    np.testing.assert_allclose(by_rejected / 4, expected[2], atol=2e-6)


@pytest.mark.parametrize(
    "mismatched, expected, slopes",
    [
        # Mean log-ratios of the mismatched answers: .525 in one direction, and clipped to 0 in the other.
        ((REF_REJECTED, REJECTED), 0.483573, [-0.024375, 0.014581, -0.024358, 0.014335]),
        ((REJECTED, REF_REJECTED), 0.473441, [-0.024238, 0.014879, -0.024108, 0.01473]),
    ],
)
def test_trl_kto(mismatched, expected, slopes):
    desirable = np.array([True, False, True, False])

    def mean(policy):
        return jnp.mean(kto(policy, REF_CHOSEN, desirable, kto_baseline(*mismatched), 0.3, 1.3, 0.8)[0])

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(CHOSEN))
    assert float(value) == pytest.approx(expected, abs=2e-6)
    np.testing.assert_allclose(gradient, slopes, atol=2e-6)


def test_trl_reference_free():
    free = CHOSEN, REJECTED, None, None, 0.3
    np.testing.assert_allclose(cpo(CHOSEN, REJECTED, 0.3)[0], [0.567232, 0.90704, 0.11229, 0.620957], atol=2e-6)
    smoothed, _ = dpo(*free, label_smoothing=0.1)
    np.testing.assert_allclose(smoothed, [0.594232, 0.86804, 0.32529, 0.635957], atol=2e-6)
    np.testing.assert_allclose(dpo(*free, kind="hinge")[0], [0.73, 1.39, 0, 0.85], atol=2e-6)
    np.testing.assert_allclose(dpo(*free, kind="ipo")[0], [0.587778, 8.801111, 29.521111, 1.361111], rtol=2e-6)
    loss, _ = simpo(MEAN_CHOSEN, MEAN_REJECTED, beta=2.0, gamma=0.5)
    np.testing.assert_allclose(loss, [1.016094, 0.435131, 0.513015, 1.171101], atol=2e-6)
    loss, _ = orpo(MEAN_CHOSEN, MEAN_REJECTED, beta=0.1)
    np.testing.assert_allclose(loss, [0.07196, 0.041279, 0.043178, 0.080763], atol=2e-6)


@pytest.mark.parametrize(
    "margin, centering, expected",
    [(None, 0.0, 0.589266), (None, 0.01, 1.777166), ([0, 0.5, 1, 2], 0.0, 0.999446), ([0, 0.5, 1, 2], 0.01, 2.187346)],
)
def test_trl_reward_model(margin, centering, expected):
    margin = None if margin is None else np.array(margin)
    loss = bradley_terry(CHOSEN, REJECTED, np.ones(4), centering, margin)
    assert float(loss.mean()) == pytest.approx(expected, rel=2e-6)


# -- TRL: four responses of up to three tokens. --

LOGPROBS = np.array([[-0.5, -1.2, -0.3], [-2.0, -0.7, -0.1], [-0.9, -0.4, -1.5], [-0.2, -3.0, -0.6]])
OLD = np.array([[-0.7, -1.0, -0.3], [-1.1, -0.9, -0.4], [-0.9, -1.0, -1.1], [-0.6, -2.8, -0.2]])
REFERENCE = np.array([[-0.6, -1.1, -0.5], [-1.5, -0.7, -0.2], [-1.0, -0.5, -1.2], [-0.3, -2.5, -0.6]])
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
ROW_ADVANTAGES = np.array([1.0, -0.5, -1.5, 0.8])
ADVANTAGES = np.asarray(broadcast_to_tokens(ROW_ADVANTAGES, MASK))


def _clip(x, dual=None):
    return clipped_surrogate(x, OLD, ADVANTAGES, 0.2, 0.28, MASK, dual)[0]


# From TRL's loss_type (and importance_sampling_level, beta, delta) to loss per token, aggregation, and TRL's result.
POLICY = {
    "grpo": (_clip, "sequence_mean_token_mean", 0.069758,
             [[-0.101784, -0.068228, -0.083333], [0, 0.076338, 0], [0.125, 0.227765, 0], [0, 0, 0]]),
    "dapo": (_clip, "token_mean", 0.264416,
             [[-0.135711, -0.09097, -0.111111], [0, 0.067856, 0], [0.166667, 0.303686, 0], [0, 0, 0]]),
    "dr_grpo": (_clip, "token_sum_constant", 0.118987,
                [[-0.06107, -0.040937, -0.05], [0, 0.030535, 0], [0.075, 0.136659, 0], [0, 0, 0]]),
    "grpo, sequence": (lambda x: gspo(x, OLD, ADVANTAGES, 0.1, 0.15, MASK)[0], "sequence_mean_token_mean", 0.033352,
                       [[-0.083333] * 3, [0, 0, 0], [0.133617] * 3, [0, 0, 0]]),
    # TRL's epsilon_high is the largest weight itself; there is no lower bound.
    "cispo": (lambda x: cispo(x, OLD, ADVANTAGES, 1.0, 0.3, MASK)[0], "token_mean", -0.263456,
              [[-0.135711, -0.09097, -0.111111], [0.022587, 0.067856, 0], [0.166667, 0.216667, 0.11172], [-0.115556, 0, 0]]),
    "grpo, beta .04": (lambda x: _clip(x) + 0.04 * kl_loss(x, REFERENCE, "k3", MASK), "sequence_mean_token_mean", 0.070844,
                       [[-0.101466, -0.068578, -0.082729], [-0.003244, 0.076338, 0], [0.125317, 0.228082, -0.001166],
                        [0.000952, 0, 0]]),
    "grpo, delta 1.4": (lambda x: _clip(x, 1.4), "sequence_mean_token_mean", 0.016993,
                        [[-0.101784, -0.068228, -0.083333], [0, 0.076338, 0], [0.125, 0, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("name", POLICY)
def test_trl_policy_losses(name):
    per_token, mode, expected, slopes = POLICY[name]
    value, gradient = jax.jit(jax.value_and_grad(lambda x: aggregate(per_token(x), MASK, mode, max_length=5)))(LOGPROBS)
    assert float(value) == pytest.approx(expected, abs=2e-6)
    np.testing.assert_allclose(gradient, slopes, atol=2e-6)


def test_the_first_gradient_of_trl_rloo_equals_ours():
    """TRL clips the ratio of whole responses; on samples of the policy itself its gradient is that of plain REINFORCE."""

    def loss(x):
        return aggregate(policy_gradient(x, ADVANTAGES, MASK), MASK, "sequence_mean_token_sum")

    expected = [[-0.25] * 3, [0.125, 0.125, 0], [0.375] * 3, [-0.2, 0, 0]]
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(LOGPROBS)), expected, rtol=1e-6)


def test_trl_group_advantages():
    scores = np.array([0.3, 1.2, -0.5, 0.9, 2.0, 2.0, 1.0, 0.0])
    scaled = [-0.233302, 0.966538, -1.299827, 0.566591, 0.783268, 0.783268, -0.261089, -1.305446]
    # TRL's epsilon is 1e-4.
    np.testing.assert_allclose(grpo(scores, 4, eps=1e-4), scaled, atol=2e-6)
    np.testing.assert_allclose(grpo(scores, 4, "none"), [-0.175, 0.725, -0.975, 0.425, 0.75, 0.75, -0.25, -1.25], atol=2e-6)
    left_out = [-0.233333, 0.966667, -1.3, 0.566667, 1.0, 1.0, -0.333333, -1.666667]
    np.testing.assert_allclose(rloo(scores, 4), left_out, atol=2e-6)
