"""One named test for each known fault of other systems; its docstring describes the fault."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.algorithms import masked
from jaxalign.algorithms.advantages import gae
from jaxalign.algorithms.kl import kl_penalty
from jaxalign.algorithms.policy_losses import clipped_surrogate
from jaxalign.algorithms.rewards import shape_rewards
from jaxalign.algorithms.value_losses import clipped_value_loss
from jaxalign.models.heads import token_stats
from jaxalign.parallel.sharding import one_device
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.preference_step import sequence_scores
from tests import tiny


def test_pitfall_01_rewards_stay_float():
    """Rewards were written into an integer array shaped like the token ids: 0.73 became 0."""
    rewards = shape_rewards(
        scores=np.array([0.73, -0.4], np.float32),
        kl=np.zeros((2, 3), np.int32),
        kl_coef=0.05,
        response_length=np.array([3, 2]),
        ended=np.array([True, True]),
    )
    assert rewards.dtype == jnp.float32
    np.testing.assert_allclose(rewards, [[0, 0, 0.73], [0, -0.4, 0]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, bool, jnp.bfloat16])
def test_pitfall_01_integer_scores_are_cast_to_float(dtype):
    """The reverse case: an integer score with a fractional KL penalty must not round the penalty to integers."""
    scores = jnp.asarray([1], dtype)
    rewards = shape_rewards(scores, np.array([[0.5, 0.25]]), 0.1, np.array([2]), np.array([True]))
    assert rewards.dtype == jnp.float32
    np.testing.assert_allclose(rewards, [[-0.05, 0.975]], rtol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("settings", [{"temperature": 0.9}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}])
def test_pitfall_02_equal_weights_have_a_kl_of_0(settings):
    """The log-probs of the reference were divided by the rollout temperature, those of the policy were not: a KL of .104 at
    .9."""
    setup = tiny.setup(**settings)
    state = tiny.state(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    _, metrics = tiny.experience(setup, state, tiny.roles(setup), sampled)
    assert abs(float(metrics.kl_k1)) < 1e-5 and float(metrics.kl_k3) < 1e-7
    other, metrics = tiny.experience(setup, state, tiny.roles(setup, reference_seed=1), sampled)
    assert float(metrics.kl_k3) > 0.1  # a real difference is measured


def test_pitfall_03_no_key_is_used_twice():
    """All rollout calls used one key, and equal prompts got equal answers."""
    engine, sampling = Engine(tiny.model(), 4, 32, 8), Sampling(8, ())
    params, run_key = tiny.place(tiny.model(), tiny.host_params()), jax.random.key(0)

    def responses(step):
        key, rows = jax.random.fold_in(run_key, step), range(8 * step, 8 * step + 8)
        return [r.ids for r in tiny.respond(engine, params, [[1, 4]] * 8, key, sampling, rows)]

    first, second = responses(0), responses(1)  # two batches of four responses
    assert len(set(first + second)) == 16
    assert responses(0) == first


@pytest.mark.medium
def test_pitfall_04_pooling_finds_the_last_token_by_length():
    """"The last token that is not padding" is wrong if pad = eos, and in a text that contains the pad token."""
    eos = pad = 2
    model, params = tiny.model(head="scalar"), tiny.host_params("scalar")
    texts = [[1, 7, eos, 9, eos], [1, 7, 8, eos], [eos]]
    tokens = np.full((3, 8), pad, np.int32)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = ids
    found = sequence_scores(model, params, tokens, jnp.array([5, 4, 1]))
    alone = [float(sequence_scores(model, params, np.array([ids]), jnp.array([len(ids)]))[0]) for ids in texts]
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_pitfall_05_the_score_is_on_the_last_response_token():
    """The score was placed on the padding after eos; the missing-eos rule looked for a token that was not the stop token."""
    lengths, ended = np.array([1, 3, 4, 0]), np.array([True, True, False, False])
    rewards = np.asarray(shape_rewards(np.array([1.0, 2.0, 3.0, 4.0]), np.zeros((4, 4)), 0.1, lengths, ended))
    np.testing.assert_array_equal(rewards, [[1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    # The sampler, which knows its stop set, reports whether a response ended; no token id is inspected.
    replaced = shape_rewards(np.array([1.0, 2.0, 3.0, 4.0]), np.zeros((4, 4)), 0.1, lengths, ended, "replace", -1.0)
    np.testing.assert_array_equal(replaced, [[1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, -1], [0, 0, 0, 0]])


@pytest.mark.parametrize("garbage", [999.0, np.inf, np.nan])
def test_pitfall_06_values_pass_across_masked_tokens(garbage):
    """GAE stopped or leaked at masked (tool, observation) tokens inside a response."""
    clean = gae(np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.3]]), np.ones((1, 3)), 1.0, 0.95)
    mask = np.array([[1, 0, 0, 1, 1, 0]])
    rewards = np.array([[0.0, garbage, garbage, 0.0, 1.0, garbage]])
    values = np.array([[0.5, garbage, garbage, 0.4, 0.3, garbage]])
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    # The worked example without masked tokens, spread over the unmasked tokens.
    np.testing.assert_allclose(advantages, [[0.43675, 0, 0, 0.565, 0.7, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0.93675, 0, 0, 0.965, 1.0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(advantages)[mask == 1], np.asarray(clean[0])[0])


def test_pitfall_07_whitening_is_global_on_any_mesh():
    """Each device or micro-batch whitened advantages with its own statistics."""
    rng = np.random.default_rng(0)
    # The rows of each device have a different mean: local statistics would remove the training signal.
    x = rng.normal(size=(8, 5)) + np.arange(8)[:, None]
    mask = rng.integers(0, 2, size=(8, 5)).astype(bool)
    chosen = x[mask]
    expected = np.where(mask, (x - chosen.mean()) / chosen.std(), 0)
    devices = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x, mask = jax.device_put((x.astype(np.float32), mask), sharding)
    np.testing.assert_allclose(jax.jit(masked.whiten)(x, mask), expected, atol=1e-5)


@pytest.mark.parametrize("mode", masked.AGGREGATIONS)
@pytest.mark.parametrize("bounds", [(0, 4, 8), (0, 1, 5, 6, 8), (0, 2, 4, 6, 8)])
def test_pitfall_08_micro_batches_add_up_to_the_full_batch(mode, bounds):
    """Losses were averaged over each micro-batch and then averaged again, so the result depended on gradient accumulation."""
    rng = np.random.default_rng(1)
    lengths = np.array([7, 1, 3, 0, 5, 2, 7, 4])  # uneven, with one empty row: a mean of means would differ
    logprobs, old, advantages, values, old_values, returns = rng.normal(size=(6, 8, 7)).astype(np.float32)
    mask = (np.arange(7)[None, :] < lengths[:, None]).astype(np.float32)
    total = masked.aggregate_total(mask, mode)

    def loss(learnt, rows):
        policy, _ = clipped_surrogate(learnt[0][rows], old[rows], advantages[rows], mask=mask[rows])
        value, _ = clipped_value_loss(learnt[1][rows], old_values[rows], returns[rows], clip=0.2, mask=mask[rows])
        return masked.aggregate(policy + 0.1 * value, mask[rows], mode, total)

    @jax.jit
    def whole_and_parts(learnt):
        return [jax.value_and_grad(loss)(learnt, slice(*part)) for part in [(0, 8), *itertools.pairwise(bounds)]]

    (whole, whole_gradient), *parts = whole_and_parts(np.stack([logprobs, values]))
    np.testing.assert_allclose(sum(part for part, _ in parts), whole, atol=1e-6)
    np.testing.assert_allclose(sum(gradient for _, gradient in parts), whole_gradient, atol=1e-7)


@pytest.mark.parametrize("garbage", [-50.0, np.inf, np.nan])
def test_pitfall_09_metrics_ignore_padding(garbage):
    """Entropy, KL and ratio metrics were averaged over padding, and even gave a "negative entropy"."""
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    logprobs = np.where(mask, np.array([[-1.0, -2.0, 0], [-0.5, 0, 0]]), garbage)
    reference = np.where(mask, np.array([[-1.5, -1.0, 0], [-1.0, 0, 0]]), 0)
    # By hand: the differences are .5, -1, .5, so their mean is 0, and the mean of half their squares is .25.
    assert float(masked.masked_mean(kl_penalty(logprobs, reference, "k1"), mask)) == pytest.approx(0, abs=1e-7)
    assert float(masked.masked_mean(kl_penalty(logprobs, reference, "k2"), mask)) == pytest.approx(0.25)
    _, stats = clipped_surrogate(logprobs, reference, np.ones((2, 3)), mask=mask)
    expected_ratio = (2 * np.exp(0.5) + np.exp(-1)) / 3
    assert float(masked.masked_mean(stats.ratio, mask)) == pytest.approx(expected_ratio, rel=1e-6)
    # Ratios e^.5 are above 1.2 and clipped for a positive advantage; e^-1 is not.
    assert float(masked.masked_mean(stats.clipped, mask)) == pytest.approx(2 / 3)


def test_pitfall_14_the_logits_of_a_rollout_are_never_materialised():
    """All logits of the rollout were kept in float32: 33 GB for 64 x 1024 x 128k. Measured in the compiled program."""
    B, T, D, V = 4, 256, 16, 8192
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, D), (D, V)))
    targets = jax.ShapeDtypeStruct((B, T), jnp.int32)
    whole = 4 * B * T * V

    def memory(chunk_floats):
        def loss(hidden, weight, targets):
            stats = token_stats(hidden, weight, targets, 0.7, chunk_floats, sharding=one_device())
            return jnp.sum(stats.logprobs) + jnp.sum(stats.entropy)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, weight, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunk = B * 8 * V  # eight positions per chunk
    assert memory(B * T * V) > whole  # the measure detects the whole logits
    assert memory(chunk) < 8 * 4 * chunk < whole / 3


@pytest.mark.medium
def test_pitfall_20_the_preference_model_can_differ_from_the_policy():
    """Other systems need both to have the same architecture. Here it has its own sizes, weights and head; its scores are
    floats."""
    setup = tiny.setup()
    other = tiny.model(head="scalar", layers=1, embed=32, heads=2, kv_heads=1)
    setup = dataclasses.replace(setup, critic=other)
    preference, critic = (tiny.to_host(other.init(jax.random.key(seed))) for seed in (7, 8))
    state, frozen = tiny.state(tiny.setup()), tiny.roles(tiny.setup())
    frozen = dataclasses.replace(frozen, preference=preference)
    state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=critic))
    sampled = tiny.rollout(setup, state.policy.params)
    _, metrics = tiny.experience(setup, state, frozen, sampled)
    length = sampled.prompt_length + sampled.response_length
    scores = np.asarray(sequence_scores(other, preference, sampled.tokens, length))
    assert float(metrics.score) == pytest.approx(((scores - 0.1) / 0.5).mean(), rel=1e-4)


def test_every_pitfall_has_a_named_test():
    """Tests of the other faults are next to the tests of the code concerned."""
    text = "".join(path.read_text() for path in sorted(pathlib.Path(__file__).parent.rglob("test_*.py")))
    assert {int(number) for number in re.findall(r"def test_pitfall_(\d\d)_", text)} == set(range(1, 33))
