"""Log-probabilities of -inf and large log-ratios: losses and gradients are finite or have their documented infinite limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.algorithms import policy_losses
from jaxalign.algorithms.advantages import discounted_returns, gae, lambda_returns, vtrace
from jaxalign.algorithms.direct_preference import DPO_KINDS, dpo
from jaxalign.algorithms.kl import ESTIMATORS, kl_loss
from jaxalign.algorithms.kto import kto, kto_baseline
from jaxalign.algorithms.reference_free import cpo, orpo, simpo

NORMAL = [jnp.array([-3.0, -2.0]), jnp.array([-4.0, -5.0]), jnp.array([-3.5, -2.5]), jnp.array([-4.5, -4.0])]


def _require_no_nan(loss, inputs, kind):
    value, gradients = jax.value_and_grad(lambda x: jnp.sum(loss(*x)))(inputs)
    for array in (value, *jax.tree.leaves(gradients)):
        assert not np.isnan(array).any(), (kind, value, gradients)


@pytest.mark.medium
@pytest.mark.parametrize("kind", DPO_KINDS)
def test_an_impossible_response_gives_no_nan_in_any_preference_loss(kind):
    smoothing = 0.1 if kind in ("conservative", "robust", "exo_pair") else 0.0
    lengths = {"chosen_lengths": np.array([3, 4]), "rejected_lengths": np.array([2, 5])}
    for label in (1.0, 0.0, 0.5):
        for place in range(4):
            inputs = [x.at[0].set(-jnp.inf) if i == place else x for i, x in enumerate(NORMAL)]
            _require_no_nan(
                lambda *x, y=label: dpo(*x, 0.1, y, kind, smoothing, **lengths)[0], inputs, (kind, label, place)
            )


@pytest.mark.parametrize("loss", [cpo, orpo, simpo])
@pytest.mark.parametrize("label", [1.0, 0.0, 0.5])
def test_an_impossible_response_gives_no_nan_without_a_reference(loss, label):
    for place in range(2):
        inputs = [x.at[0].set(-jnp.inf) if i == place else x for i, x in enumerate(NORMAL[:2])]
        _require_no_nan(lambda *x: loss(*x, label=label)[0], inputs, (loss, label, place))


@pytest.mark.parametrize("place", [0, 1])
def test_an_impossible_response_gives_no_nan_in_kto(place):
    inputs = [x.at[0].set(-jnp.inf) if i == place else x for i, x in enumerate(NORMAL[:2])]
    _require_no_nan(lambda *x: kto(*x, np.array([1, 0]), kto_baseline(*x))[0], inputs, place)


@pytest.mark.parametrize("name", ["clipped_surrogate", "gspo", "cispo", "policy_gradient", "decoupled_surrogate"])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("place", [0, 1])
def test_an_impossible_token_gives_finite_policy_losses(name, advantage, place):
    new, old = ([x[None].at[0, 0].set(-jnp.inf) if i == place else x[None] for i, x in enumerate(NORMAL[:2])])
    others = {"policy_gradient": (), "decoupled_surrogate": (old, NORMAL[2][None])}.get(name, (old,))

    def total(logprobs):
        result = getattr(policy_losses, name)(logprobs, *others, jnp.full((1, 2), advantage))
        return jnp.sum(result[0] if isinstance(result, tuple) else result)

    value, gradient = jax.value_and_grad(total)(new)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("place", [0, 1])
def test_an_impossible_token_gives_no_nan_in_the_kl(kind, place):
    inputs = [x.at[0].set(-jnp.inf) if i == place else x for i, x in enumerate(NORMAL[:2])]
    _require_no_nan(lambda *x: kl_loss(*x, kind), inputs, (kind, place))


@pytest.mark.parametrize("log_ratio", [50.0, 89.0, 100.0, 1e4, np.inf, -100.0, -np.inf])
def test_vtrace_with_infinite_clips_is_finite(log_ratio):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 2, 12)).astype(np.float32)
    log_ratios = np.full((2, 12), log_ratio, np.float32) * np.where(rng.random((2, 12)) < 0.3, 0.01, 1).astype(np.float32)
    infinite = {"rho_clip": np.inf, "c_clip": np.inf, "pg_rho_clip": np.inf}
    result = vtrace(rewards, values, log_ratios, np.ones((2, 12)), 0.99, 0.9, **infinite)
    assert np.isfinite(result.targets).all() and np.isfinite(result.advantages).all()


@pytest.mark.medium
@pytest.mark.parametrize("bad", [np.nan, np.inf, 7.0])
def test_the_discount_of_a_masked_step_does_not_matter(bad):
    rng, mask = np.random.default_rng(1), np.array([[1, 0, 1, 1], [0, 1, 1, 0]])
    x, values, ratios = rng.normal(size=(3, 2, 4))
    gamma = np.full((2, 4), 0.9)
    spoilt = np.where(mask, gamma, bad)
    for estimate in (
        lambda g, x: discounted_returns(x, mask, g),
        lambda g, x: gae(x, values, mask, g)[0],
        lambda g, x: lambda_returns(x, values, mask, g),
        lambda g, x: vtrace(x, values, ratios, mask, g).advantages,
    ):
        np.testing.assert_array_equal(estimate(gamma, x), estimate(spoilt, x))
        clean, dirty = (jax.grad(lambda r, g=g, f=estimate: jnp.sum(f(g, r)))(x) for g in (gamma, spoilt))
        np.testing.assert_array_equal(clean, dirty)
    with pytest.raises(ValueError, match="gamma is"):
        discounted_returns(x, np.ones((2, 4)), spoilt)
