"""The smallest models, prompts and PPO setups that still have every part, shared so that compiled programs are reused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxalign.config import Mesh, Optimizer, PPOConfig
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.records import Rollout
from jaxalign.rewards.scorer import Scorer, rollout_scores
from jaxalign.rl.experience import make_experience
from jaxalign.rl.state import PPOSetup, init_ppo_state
from jaxalign.rollout import sampler
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampler import Engine, LocalSampler, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.loop import Loop
from jaxalign.steps.optimizer import make_optimizer
from tests.few_programs import sample_with_few_programs

STOPS = (2, 9, 20, 25)  # several, so that some responses end and some are truncated
DECODER = DecoderConfig(vocab=32, layers=1, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24)
PROMPTS = [[1, 7, 9], [1, 4], [1, 11, 12, 13, 14, 15, 16], [1], [1, 30, 29], [1, 5, 6, 7, 8], [1, 9, 9, 9], [1, 21, 22]]
# For programs that run once: these options do not change results and halve compile time.
COMPILE_FAST = {"xla_backend_optimization_level": 0}
MESHES = ((2, 2, 2), (8, 1, 1), (1, 4, 2), (4, 2, 1))


def model(mesh: tuple[int, int, int] | None = None, head: str = "lm", **changes) -> Model:
    """A decoder of width 16 with one layer, or two with the fixture `two_layers`.

    `mesh`: sizes of data, fsdp and tensor; None is one device.
    """
    config = dataclasses.replace(DECODER, **changes)
    return Model(config, head, make_sharding(Mesh(*(mesh or ()))))


def host_params(head: str = "lm", seed: int = 0, scale: float = 1.0, **changes):
    """Random parameters on the host. With `scale` above 1 the distributions are far from uniform."""
    return _host_params(model(head=head, **changes), seed, scale)


@functools.cache
def _host_params(model: Model, seed: int, scale: float):
    return jax.tree.map(lambda x: np.asarray(x) * np.float32(scale), model.init(jax.random.key(seed)))


def place(model: Model, params):
    """Copy host parameters to new device buffers, sharded by the model's rules; the copies can be donated."""
    return jax.tree.map(lambda x, sharding: jax.device_put(x, sharding), params, model.shardings())


@functools.partial(jax.jit, static_argnums=0)
def all_hidden(model: Model, params, tokens, positions=None, segments=None):
    """`model.hidden` in one program: without jit, each of its operations would be compiled separately."""
    return model.hidden(params, tokens, positions, segments)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model: Model, params, tokens):
    """Logits [B, T, V] in one program."""
    return model.logits(params, model.hidden(params, tokens))


def hidden(model: Model, params, ids) -> np.ndarray:
    """The hidden states [T, D] of one sequence. It is padded to a multiple of 16, so that one program serves many lengths: no
    state depends on later tokens."""
    padded = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % 16))
    return np.asarray(all_hidden(model, params, padded[None]))[0, : len(ids)]


def rows(batch: Model, arrays):
    """Place a record of numpy arrays on the devices, split over the batch axes."""
    return jax.device_put(arrays, batch.sharding.batch)


def setup(mesh=None, compute_dtype: str = "float32", learning_rate: float = 1e-2, **changes) -> PPOSetup:
    """PPO with 8 rows, 2 minibatches and 2 epochs; rates are constant. Every setting that tests rely on is set here."""
    config = PPOConfig(batch=8, max_new_tokens=8, epochs=2, minibatches=2, temperature=1.0, gamma=1.0, lam=0.95, clip=0.2,
                 value_clip=0.2, kl_coef=0.05, missing_eos="replace", missing_eos_value=-1.0)
    config = dataclasses.replace(config, **changes)
    optimizer = make_optimizer(Optimizer(learning_rate=learning_rate, schedule="constant", eps=1e-5), 100)
    policy = model(mesh, compute_dtype=compute_dtype)
    if config.critic == "shared":
        policy = policy.with_head("lm_scalar")
    critic = policy if config.critic == "shared" else policy.with_head("scalar")
    return PPOSetup(policy, critic, optimizer, optimizer, config)


def scorer(setup: PPOSetup) -> Scorer:
    """The reward of these tests: a preference model with the critic's sizes, a shift and a scale."""
    model = setup.policy.with_head("scalar") if setup.shares_trunk else setup.critic
    return Scorer(model, 0.1, 0.5, setup.config.score_clip)


def sampling(setup: PPOSetup, **changes) -> Sampling:
    config = setup.config
    made = Sampling(config.max_new_tokens, STOPS, config.temperature, config.top_k, config.top_p)
    return dataclasses.replace(made, **changes)


@dataclasses.dataclass(frozen=True)
class FrozenRoles:
    """Parameters of the models that RL does not train."""

    reference: Any
    preference: Any


def roles(setup: PPOSetup, reference_seed: int = 0) -> FrozenRoles:
    return FrozenRoles(
        place(setup.reference, host_params(seed=reference_seed)),
        place(setup.policy.with_head("scalar"), host_params("scalar", seed=5)),
    )


def state(setup: PPOSetup):
    policy, critic = place(setup.policy, host_params()), place(setup.critic, host_params("scalar", seed=3))
    return init_ppo_state(setup, policy, critic, jax.random.key(11))


def rollout(setup: PPOSetup, params, key: int = 0, **changes):
    """One rollout of PROMPTS, 8 rows."""
    engine = Engine(setup.policy, 8, 32, bucket=8)
    with pytest.MonkeyPatch.context() as patch:
        sample_with_few_programs(patch)
        return sample(engine, params, PROMPTS, jax.random.key(key), range(8), sampling(setup, **changes))


def respond(engine: Engine, params, prompts, key, sampling: Sampling, rows, on_finished=None) -> list[Response]:
    """The responses of a local sampler."""
    return sampler.respond(LocalSampler(engine, params), prompts, key, rows, sampling, on_finished)


def sample(engine: Engine, params, prompts, key, rows, sampling: Sampling) -> Rollout:
    """The rollout of a local sampler, without versions."""
    local = LocalSampler(engine, params)
    return sample_rollout(local, engine.padding, prompts, key, rows, sampling, versions=False)


def experience(setup: PPOSetup, state, frozen, sampled, recompute: bool = False):
    scores = rollout_scores(scorer(setup), frozen.preference, sampled)
    critic = state.policy.params if setup.shares_trunk else state.critic.params if setup.has_critic else None
    return make_experience(
        setup, recompute, frozen.reference, state.policy.params, critic, state.kl_coef, sampled, scores
    )


def run_loop(loop: Loop, init, abstract, step_fn):
    """Trains to the last step and returns the final state. Takes the arguments of `Loop.begin`."""
    training = loop.begin(init, abstract, step_fn)
    for _ in training:
        pass
    return training.state


def to_host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))
