"""Every training step with adapters leaves the base unchanged, and its update follows the chain rule.

With W = W0 + s a b, the gradient of a is s G b^T and that of b is s a^T G, where G is the gradient of W in the same step
without adapters on merged weights.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.config import DPOConfig
from jaxalign.models.adapters.lora import LINEAR, LoraAdapters, merge, trained
from jaxalign.records import AnswerPairs
from jaxalign.rl.state import PPOState, init_ppo_state
from jaxalign.rl.update import ppo_update
from jaxalign.steps.arguments import DirectArguments, LmArguments, PreferenceArguments
from jaxalign.steps.direct_step import direct_step
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.preference_step import preference_step
from jaxalign.steps.state import init_state
from tests import tiny
from tests.adapters import adapted, frozen
from tests.steps.batches import PAIRS, ROWS

pytestmark = pytest.mark.usefixtures("two_layers")
LORA = LoraAdapters(rank=2, alpha=3.0, targets=("*",))
SGD = optax.sgd(1.0)  # the update subtracts the gradient
RNG = np.random.default_rng(3)
ANSWERS = AnswerPairs(
    RNG.integers(0, 32, (8, 2, 9)).astype(np.int32), RNG.integers(1, 4, (8, 2)).astype(np.int32),
    RNG.integers(5, 10, (8, 2)).astype(np.int32), np.full(8, 0.9, np.float32), np.ones(8, np.float32),
    -RNG.random((8, 2)).astype(np.float32) * 20,
)


@functools.cache
def buffer():
    setup = tiny.setup(epochs=1, minibatches=1)
    state = tiny.state(setup)
    experience, _ = tiny.experience(setup, state, tiny.roles(setup, 1), tiny.rollout(setup, state.policy.params))
    return tiny.to_host(experience)


def language(model, params, base):
    given = LmArguments(model=model, optimizer=SGD, micro_batches=2, batch=ROWS, frozen=base)
    return lm_step(init_state(model, SGD, params, jax.random.key(0)), given)


def direct(model, params, base):
    section = DPOConfig(objective="sigmoid", batch=8)
    given = DirectArguments(model=model, optimizer=SGD, section=section, batch=ANSWERS, frozen=base)
    return direct_step(init_state(model, SGD, params, jax.random.key(0)), given)


def preference(model, params, base):
    given = PreferenceArguments(model=model, optimizer=SGD, centering_coef=0.01, batch=PAIRS, frozen=base)
    return preference_step(init_state(model, SGD, params, jax.random.key(0)), given)


STEPS = {"lm": (language, "lm"), "direct": (direct, "lm"), "preference": (preference, "scalar")}


def with_score(params, head):
    return params if head == "lm" else params | {"score": tiny.host_params("scalar")["score"]}


def gradients(start, state):
    return jax.tree.map(np.subtract, start, tiny.to_host(state.params))


def check_chain_rule(params, found, full):
    """found: gradients of the adapters; full: gradients of the merged weights; params: where both were computed."""
    for part, leaves in params["adapters"].items():
        for name, own in leaves.items():
            count, G = LINEAR[part, name][0], full["blocks"][part][name]
            for layer in range(2):
                a, b, g = own["a"][layer].reshape(-1, 2), own["b"][layer].reshape(2, -1), G[layer]
                g = g.reshape(len(a), -1)
                assert g.shape[1] == b.shape[1] and count == own["a"].ndim - 2
                mine = found["adapters"][part][name]
                np.testing.assert_allclose(mine["a"][layer].reshape(-1, 2), 1.5 * g @ b.T, rtol=1e-4, atol=2e-6)
                np.testing.assert_allclose(mine["b"][layer].reshape(2, -1), 1.5 * a.T @ g, rtol=1e-4, atol=2e-6)
    if "score" in found:
        np.testing.assert_allclose(found["score"], full["score"], rtol=1e-4, atol=2e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(found)) > 1e-3


def assert_unchanged(base, host):
    """Check that the base was not donated and is byte for byte unchanged."""
    chex.assert_trees_all_equal(tiny.to_host(base), host)


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", STEPS)
def test_an_update_follows_the_chain_rule_and_leaves_the_base_unchanged(kind):
    step, head = STEPS[kind]
    model, params = adapted(LORA, head=head)
    params = with_score(params, head)
    base = tiny.place(model.base, frozen(params))
    state, metrics = step(model, tiny.place(model, trained(params)), base)
    merged = tiny.to_host(merge(LORA, params))
    plain = tiny.model(head=head)
    full, expected = step(plain, tiny.place(plain, merged), None)
    assert float(metrics.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    check_chain_rule(params, gradients(trained(params), state), gradients(merged, full))
    assert_unchanged(base, frozen(params))


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_ppo_update_follows_the_chain_rule_and_leaves_the_base_unchanged(critic):
    """Policy and critic share one base, with separate or shared adapters."""
    plain = dataclasses.replace(tiny.setup(epochs=1, minibatches=1, critic=critic), policy_optimizer=SGD, critic_optimizer=SGD)
    setup = dataclasses.replace(
        plain, policy=dataclasses.replace(plain.policy, lora=LORA), critic=dataclasses.replace(plain.critic, lora=LORA)
    )
    starts = [with_score(adapted(LORA, seed=seed)[1], head) for seed, head in
              ((1, "scalar" if critic == "shared" else "lm"), (2, "scalar"))]
    models = (setup.policy, setup.critic)
    own = [tiny.place(model, trained(params)) for model, params in zip(models, starts, strict=True)]
    base = tiny.place(setup.policy.base, frozen(starts[0]))
    state, _ = ppo_update(setup, init_ppo_state(setup, *own, jax.random.key(0)), buffer(), base)
    merged = [tiny.to_host(merge(LORA, params)) for params in starts]
    placed = [tiny.place(model, params) for model, params in zip((plain.policy, plain.critic), merged, strict=True)]
    full, _ = ppo_update(plain, init_ppo_state(plain, *placed, jax.random.key(0)), buffer())
    roles = ("policy",) if critic == "shared" else ("policy", "critic")
    for role, start, whole in zip(roles, starts, merged, strict=False):
        found, expected = getattr(state, role), getattr(full, role)
        check_chain_rule(start, gradients(trained(start), found), gradients(whole, expected))
    assert isinstance(state, PPOState) and (state.critic is None) == (critic == "shared")
    assert_unchanged(base, frozen(starts[0]))
