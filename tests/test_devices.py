"""A mesh of one device may be on any device: sampling, a supervised step and PPO on the fourth of eight."""

from __future__ import annotations

import dataclasses

import chex
import jax
import pytest

import jaxalign as ja
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import default_device
from jaxalign.parallel.rows import committed
from jaxalign.parallel.sharding import one_device
from jaxalign.rl.state import init_ppo_state
from jaxalign.rl.update import ppo_update
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import made_tokenizers, tiny
from tests.trainers import small

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def device():
    return jax.devices()[3]


def _devices(tree):
    return {device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()}


def _on(model: Model, device: jax.Device) -> Model:
    return dataclasses.replace(model, sharding=one_device(device))


def test_a_model_is_on_the_device_of_its_committed_parameters(device):
    tree = {"a": jax.numpy.zeros(2), "b": jax.device_put(jax.numpy.ones(2), device)}
    model = tiny.model().on_device_of(tree)
    assert model == _on(tiny.model(), device) and _devices(committed(model.sharding, tree)) == {device}
    assert tiny.model().on_device_of({"a": jax.numpy.zeros(2)}) == _on(tiny.model(), jax.local_devices()[0])
    assert all(leaf.sharding.device_set == {device} for leaf in jax.tree.leaves(model.abstract()))
    with jax.default_device(device):
        assert default_device() == device


@pytest.mark.slow
def test_training_from_parameters_on_another_device_changes_nothing(device):
    """The mesh of a language model follows its parameters, and training stays there."""
    start = small.language_model()
    results = []
    for where in (jax.local_devices()[0], device):
        policy = dataclasses.replace(start, params=jax.device_put(tiny.to_host(start.params), where))
        trainer = ja.SFT(policy, batch_rows=2, epochs=1)
        metrics = [step.metrics for step in trainer.fit([{"prompt": "the cat", "response": "sat"}] * 2)]
        assert _devices(trainer.policy.params) == _devices(policy.params) == {where}
        results.append(tiny.to_host((trainer.policy.params, metrics)))
    chex.assert_trees_all_equal(*results)


@pytest.mark.medium
def test_sampling_on_another_device_changes_nothing(device):
    model, sampling = tiny.model(), Sampling(8, tiny.STOPS)
    engine, params = Engine(model, 3, 32, 8), tiny.place(model, tiny.host_params(scale=1.5))
    rows = range(len(tiny.PROMPTS))
    expected = tiny.respond(engine, params, tiny.PROMPTS, KEY, sampling, rows)
    params, engine = jax.device_put(params, device), Engine(_on(model, device), 3, 32, 8)
    session = engine.start(params, tiny.PROMPTS, KEY, sampling, rows)
    found = {}
    while session.unfinished:
        found |= dict(session.step())
        assert session.tiers is None or _devices(session.tiers) == {device}
    assert [found[i] for i in rows] == expected
    assert tiny.respond(engine, params, tiny.PROMPTS, KEY, sampling, rows) == expected


@pytest.mark.slow
def test_ppo_on_another_device_changes_nothing(device):
    """The answers are sampled once; a test above samples on another device."""
    results, sampled = [], None
    for where in (jax.local_devices()[0], device):
        setup = tiny.setup()
        setup = dataclasses.replace(setup, policy=_on(setup.policy, where), critic=_on(setup.critic, where))
        own, value = (jax.device_put(tiny.host_params(head, seed), where) for head, seed in (("lm", 0), ("scalar", 3)))
        state = init_ppo_state(setup, own, value, jax.random.key(11))
        assert _devices(state) == {where}
        roles = tiny.roles(setup)
        frozen = tiny.FrozenRoles(*jax.device_put((roles.reference, roles.preference), where))
        sampled = sampled or tiny.to_host(tiny.rollout(setup, state.policy.params))
        experience, _ = tiny.experience(setup, state, frozen, sampled)
        new, metrics = ppo_update(setup, state, experience)
        assert _devices(new) == {where}
        results.append(tiny.to_host((new.policy.params, new.critic.params, metrics)))
    chex.assert_trees_all_equal(*results)


@pytest.mark.medium
def test_a_model_is_loaded_on_the_default_device(device, tmp_path):
    texts = made_tokenizers.qwen(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(texts)
    model = Model(DecoderConfig(tokenizer.vocab_size, 2, 16, 4, 2, 4, 20))
    raw = config_json(model.config, 96) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    export(tmp_path / "hf", model, model.init(KEY), config=raw, source=texts)
    expected = ja.Sampler(ja.load_model(tmp_path / "hf")).generate(["the cat"], max_new_tokens=6)
    with jax.default_device(device):
        policy = ja.load_model(tmp_path / "hf")
    assert _devices(policy.params) == {device}
    assert ja.Sampler(policy).generate(["the cat"], max_new_tokens=6).ids == expected.ids
