"""An optax optimizer of one's own: exact updates, resuming, and what is refused."""

from __future__ import annotations

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Checks, Mesh
from jaxalign.data.chat import styles
from jaxalign.errors import UserError
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.ppo import PPO
from jaxalign.trainers.sft import SFT
from tests import tiny
from tests.trainers.small import EXAMPLES, PAIRS, language_model, tokenizer

pytestmark = pytest.mark.medium

RATE, MOMENTUM = 0.05, 0.9
FIELDS = {"epochs": 4, "batch_rows": 1, "row_length": 48, "checkpoint_every": 1}


def mean_loss(params):
    """The mean negative log-likelihood of the answer of the first example, token by token."""
    model = language_model()
    prompt = model.prompt_ids(EXAMPLES[0]["prompt"])
    ids = np.asarray([*prompt, *styles.encode_answer(tokenizer(), EXAMPLES[0]["response"], "plain")])
    logprobs = jax.nn.log_softmax(tiny.all_logits(model.model, params, ids[None])[0].astype(jnp.float32))
    return -jnp.mean(jnp.stack([logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))]))


def run(steps=None, optimizer=None, **options):
    optimizer = optax.sgd(RATE, momentum=MOMENTUM) if optimizer is None else optimizer
    trainer = SFT(language_model(), optimizer=optimizer, **FIELDS, **options)
    return trainer, list(itertools.islice(trainer.fit(EXAMPLES[:1]), steps))


def test_sgd_with_momentum_makes_the_steps_of_its_formula():
    trainer, steps = run()
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), language_model().params)
    trace = jax.tree.map(np.zeros_like, params)
    gradient = jax.jit(jax.grad(mean_loss))
    for _ in steps:
        gradients = gradient(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
        trace = jax.tree.map(lambda t, g: MOMENTUM * t + np.asarray(g, np.float64), trace, gradients)
        params = jax.tree.map(lambda p, t: p - RATE * t, params, trace)
    chex.assert_trees_all_close(tiny.to_host(trainer.policy.params), jax.tree.map(np.float32, params), rtol=1e-4, atol=1e-6)


def test_a_run_resumes_with_the_state_of_the_optimizer(tmp_path):
    whole, all_steps = run()
    run(2, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert rest and rest == all_steps[-len(rest) :] and len(rest) < len(all_steps)
    chex.assert_trees_all_equal(tiny.to_host(again.policy.params), tiny.to_host(whole.policy.params))
    with pytest.raises(UserError, match="contains a run with different settings"):
        run(optimizer=optax.adam(RATE), directory=tmp_path)


def test_its_moments_are_sharded_like_the_parameters():
    policy = language_model(mesh=Mesh(fsdp=2))
    trainer = SFT(policy, optimizer=optax.adam(1e-3), **FIELDS | {"batch_rows": 2})
    next(trainer.fit(EXAMPLES))
    moments, params = trainer.state.opt_state[0].mu, trainer.state.params
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(moments))
    jax.tree.map(lambda x, y: chex.assert_equal(x.sharding, y.sharding), moments, params)


@pytest.mark.slow
def test_dpo_and_ppo_take_one_too():
    dpo = DPO(language_model(), optimizer=optax.sgd(0.0), epochs=1, batch=2)
    list(dpo.fit(PAIRS))
    chex.assert_trees_all_equal(tiny.to_host(dpo.policy.params), tiny.to_host(language_model().params))

    def length(prompts, responses, **columns):
        return [len(response) for response in responses]

    rates = {"optimizer": optax.sgd(0.0), "critic_optimizer": optax.adam(1e-3)}
    ppo = PPO(language_model(), length, iterations=1, batch=2, max_new_tokens=4, checks=Checks(step_zero=False), **rates)
    list(ppo.fit(["It"]))
    chex.assert_trees_all_equal(tiny.to_host(ppo.policy.params), tiny.to_host(language_model().params))


@pytest.mark.parametrize(("optimizer", "message"), (
    (optax.polyak_sgd(), r"SFT\(optimizer\) cannot update the model's parameters \(TypeError: "),
    (optax.MultiSteps(optax.sgd(0.1), 2), r"SFT\(optimizer\) is .* of type MultiSteps; an optax optimizer, "),
    ("adam", r"SFT\(optimizer\) is 'adam' of type str; an optax optimizer, a jaxalign.config.Optimizer, or a dictionary"),
    (optax.stateless(lambda updates, params: updates["missing"]), r"SFT\(optimizer\) cannot update the model's parameters"),
))
def test_other_objects_are_refused(optimizer, message):
    with pytest.raises(UserError, match=message):
        SFT(language_model(), optimizer=optimizer)


def test_an_optimizer_that_nothing_reads_is_refused():
    with pytest.raises(UserError, match=r"PPO.critic_optimizer.* has no effect when"):
        PPO(language_model(), lambda prompts, responses, **columns: [0.0] * len(responses), critic_optimizer=optax.sgd(0.1),
            advantages="rloo", group_size=2)
