"""kl_estimator "full": the KL over the whole vocabulary, in the reward and in the loss, against numpy over all logits."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.models.adapters.lora import LoraAdapters, init_adapters, join
from jaxalign.rl.losses import policy_loss, totals
from jaxalign.rl.state import init_ppo_state
from jaxalign.rl.step_zero import step_zero_checks
from jaxalign.rl.update import ppo_update
from tests import tiny

pytestmark = pytest.mark.medium

# The same settings in several tests, so that they share programs.
REWARD = {"kl_estimator": "full", "kl_coef": 0.3, "missing_eos": "none", "temperature": 0.7}
LOSS = {"kl_in": "loss", "kl_estimator": "full", "advantages": "grpo", "group_size": 4, "whiten_advantages": False,
        "temperature": 0.7, "kl_coef": 1.0, "kl_controller": "adaptive", "kl_target": 1e3, "kl_horizon": 40,
        "learning_rate": 3e-3}


def numpy_logp(setup, params, ids):
    """log p [T, V] after every token of a row, at the sampling temperature, in float64."""
    hidden = tiny.hidden(setup.reference, params, ids).astype(np.float64)
    logits = hidden @ np.asarray(params["embedding"], np.float64).T / setup.config.temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(setup, sampled, policy, reference):
    """float64 [B, N]: sum over v of p (log p - log q) at the state before each response token, 0 after the response."""
    out = np.zeros(np.shape(sampled.logprobs))
    for row, (start, count) in enumerate(zip(sampled.prompt_length, sampled.response_length, strict=True)):
        ids = np.asarray(sampled.tokens)[row, : start + count]
        p, q = (numpy_logp(setup, params, ids)[start - 1 : -1] for params in (policy, reference))
        out[row, :count] = (np.exp(p) * (p - q)).sum(-1)
    return out


def made(reference_seed=1, **changes):
    """Return (setup, state, reference's parameters, rollout, experience, metrics)."""
    setup = tiny.setup(**changes)
    critic = tiny.place(setup.critic, tiny.host_params("scalar", seed=3)) if setup.has_critic else None
    state = init_ppo_state(setup, tiny.place(setup.policy, tiny.host_params()), critic, jax.random.key(11))
    frozen = tiny.roles(setup, reference_seed)
    sampled = tiny.rollout(setup, state.policy.params)
    return setup, state, frozen.reference, sampled, *tiny.experience(setup, state, frozen, sampled)


def test_in_the_reward_each_token_is_penalised_by_the_kl_of_its_state():
    setup, _, _, sampled, experience, metrics = made(**REWARD)
    expected = by_hand(setup, tiny.to_host(sampled), tiny.host_params(), tiny.host_params(seed=1))
    assert expected.max() > 0.01
    last = np.arange(8)[None] == np.asarray(sampled.response_length)[:, None] - 1
    score = np.asarray(experience.rewards) + 0.3 * expected
    np.testing.assert_allclose(np.where(last, 0, score), 0, atol=1e-5)  # the rest is the score, on the last token
    assert float(metrics.kl_full) == pytest.approx(expected.sum(1).mean(), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_equal_weights_have_a_kl_of_0_at_any_temperature(temperature):
    _, _, _, _, _, metrics = made(reference_seed=0, **REWARD | {"temperature": temperature})
    assert float(metrics.kl_full) == pytest.approx(0, abs=1e-6)


def test_in_the_loss_kl_and_gradient_equal_the_plain_form():
    setup, state, reference, sampled, experience, _ = made(**LOSS)
    whole, params = totals(setup, experience), tiny.to_host(state.policy.params)

    @jax.jit
    @jax.value_and_grad
    def loss(p, coef):
        return policy_loss(setup, p, experience, whole, coef, reference_params=reference)[0]

    expected = by_hand(setup, tiny.to_host(sampled), tiny.host_params(), tiny.host_params(seed=1))
    count = int(np.sum(sampled.response_length))
    (double, _), (_, gradient), (none, without) = (loss(params, coef) for coef in (2.0, 1.0, 0.0))
    assert float(double - none) == pytest.approx(2 * expected.sum() / count, rel=1e-4)

    def plain(p):  # [B, T, V] in one array
        def logits(q):
            return setup.reference.hidden(q, sampled.tokens) @ q["embedding"].T / setup.config.temperature

        mine, theirs = (jax.nn.log_softmax(logits(q)) for q in (p, reference))
        kl = jnp.sum(jnp.exp(mine) * (mine - theirs), -1)
        place = jnp.arange(kl.shape[1])[None] + 1
        start = sampled.prompt_length[:, None]
        return jnp.sum(jnp.where((place >= start) & (place < start + sampled.response_length[:, None]), kl, 0)) / count

    found = jax.tree.map(np.subtract, gradient, without)
    chex.assert_trees_all_close(found, tiny.to_host(jax.jit(jax.grad(plain))(params)), rtol=1e-3, atol=2e-6)


def distance(setup, sampled, params, reference):
    return by_hand(setup, tiny.to_host(sampled), params, reference).sum()


@pytest.mark.slow
def test_in_the_loss_the_kl_pulls_the_policy_to_the_reference():
    setup, state, reference, sampled, experience, _ = made(**LOSS)
    experience = dataclasses.replace(experience, advantages=np.zeros_like(experience.advantages))
    before = distance(setup, sampled, tiny.host_params(), tiny.host_params(seed=1))
    for _ in range(5):
        state, metrics = ppo_update(setup, state, experience, None, reference)
    chex.assert_tree_all_finite(metrics)
    assert distance(setup, sampled, tiny.to_host(state.policy.params), tiny.host_params(seed=1)) < 0.8 * before
    chex.assert_trees_all_equal(tiny.to_host(reference), tiny.host_params(seed=1))


@pytest.mark.slow
def test_adapters_are_pulled_back_to_the_base_that_is_their_reference():
    plain = tiny.setup(**LOSS)
    policy = dataclasses.replace(plain.policy, lora=LoraAdapters(4, 8.0, ("*",)))
    setup = dataclasses.replace(plain, policy=policy, critic=policy.with_head("scalar"))
    base = tiny.place(plain.policy, tiny.host_params())
    adapters = {"adapters": init_adapters(policy.lora, base["blocks"], jax.random.key(0))}
    moved = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    sampled = tiny.rollout(setup, join(base, moved))
    state = init_ppo_state(setup, moved, None, jax.random.key(1))
    experience, _ = tiny.experience(
        setup, dataclasses.replace(state, policy=dataclasses.replace(state.policy, params=join(base, moved))),
        tiny.FrozenRoles(base, tiny.roles(plain).preference), sampled,
    )
    experience = dataclasses.replace(experience, advantages=np.zeros_like(experience.advantages))

    @jax.jit
    def loss(adapters):
        whole = totals(setup, experience)
        return policy_loss(setup, join(base, adapters), experience, whole, 1.0, reference_params=base)[0]

    before = float(loss(moved))
    for _ in range(3):
        state, _ = ppo_update(setup, state, experience, base, base)
    assert 0 < loss(state.policy.params) < 0.8 * before
    chex.assert_trees_all_equal(tiny.to_host(base), tiny.host_params())


@pytest.mark.slow
@pytest.mark.parametrize("reference_seed", [0, 1])
@pytest.mark.parametrize("settings", [REWARD, LOSS], ids=["reward", "loss"])
def test_the_checks_of_step_0_pass_and_detect_another_reference(settings, reference_seed):
    setup, state, reference, sampled, experience, _ = made(reference_seed, **settings)
    found = step_zero_checks(setup, reference, state.policy.params, sampled, experience, state.kl_coef)
    assert [check.name for check in found if not check.passed] == ([] if reference_seed == 0 else ["reference KL"])


def test_the_loss_without_a_reference_is_an_error():
    setup, state, _, _, experience, _ = made(**LOSS)
    with pytest.raises(ValueError, match="needs the parameters of the reference"):
        ppo_update(setup, state, experience)


def test_the_controller_still_uses_k1():
    """As with every other estimator: "full" is the penalty, and the controller measures k1."""
    setup, state, reference, _, experience, _ = made(**LOSS)
    after, _ = ppo_update(setup, state, experience, None, reference)
    assert float(after.kl_coef) == pytest.approx(1 - 0.2 * 8 / 40, rel=1e-5)


def test_the_config_accepts_it_in_the_reward_and_in_the_loss():
    for kl_in in ("reward", "loss"):
        assert from_config_dict({"ppo": {"kl_in": kl_in, "kl_estimator": "full"}}).ppo.kl_estimator == "full"
