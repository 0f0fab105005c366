"""One training step and sampled tokens with their log-probabilities on every kind of mesh, against one device.

Every mesh has 8 CPU devices. The model has the smallest sizes that every mesh divides. Sampling runs its layers in a scan, as
on a TPU. Unrolled layers, as of small models on CPUs, sample on meshes in the tests of RL.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.config import Mesh
from jaxalign.data.packing import pack
from jaxalign.models import model as model_module
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.state import init_state
from tests import tiny
from tests.steps.batches import DECODER

pytestmark = pytest.mark.usefixtures("layers_in_a_scan", "few_sampling_programs")
MESHES = {
    "data8": Mesh(data=8),
    "fsdp8": Mesh(fsdp=8),
    "tensor8": Mesh(tensor=8),
    "data2-fsdp4": Mesh(data=2, fsdp=4),
    "data2-tensor4": Mesh(data=2, tensor=4),
    "fsdp4-tensor2": Mesh(fsdp=4, tensor=2),
    "data2-fsdp2-tensor2": Mesh(2, 2, 2),
    "zero1": Mesh(data=2, fsdp=4, zero=1),
    "zero2": Mesh(data=2, fsdp=4, zero=2),
    "zero1-tensor2": Mesh(fsdp=4, tensor=2, zero=1),
    "tensor4-sequence": Mesh(data=2, tensor=4, sequence_parallel=True),
    "fsdp2-tensor4-sequence": Mesh(fsdp=2, tensor=4, sequence_parallel=True),
    "context2": Mesh(context=2),
    "context8": Mesh(context=8),
    "data2-context4": Mesh(data=2, context=4),
    "fsdp2-context2-tensor2": Mesh(fsdp=2, context=2, tensor=2),
    "context2-tensor4-sequence": Mesh(context=2, tensor=4, sequence_parallel=True),
    "pipeline2": Mesh(pipeline=2),
    "pipeline4": Mesh(pipeline=4),
    "pipeline2-data4": Mesh(pipeline=2, data=4),
    "pipeline2-fsdp2-tensor2": Mesh(pipeline=2, fsdp=2, tensor=2),
    "pipeline2-context2-tensor2": Mesh(pipeline=2, context=2, tensor=2),
    "pipeline2-interleaved-fsdp4": Mesh(pipeline=2, fsdp=4, pipeline_repeats=2),
    "slices2": Mesh(data=4, fsdp=2, slices=2),
    "fsdp4-tensor2-sampling-as-training": Mesh(fsdp=4, tensor=2, generation="training"),
    "fsdp4-tensor2-sampling-whole": Mesh(fsdp=4, tensor=2, generation="whole"),
}
FORWARD = ("data2-fsdp2-tensor2", "zero1-tensor2", "context2-tensor4-sequence", "fsdp2-context2-tensor2",
           "pipeline2-context2-tensor2", "pipeline2-interleaved-fsdp4")
OPTIMIZER = optax.adam(1e-2)
RNG = np.random.default_rng(0)
# 16 uneven rows of one or two documents; their lengths are divisible by no mesh axis.
ROWS = pack([(RNG.integers(0, 64, n).tolist(), [1.0] * n) for n in (19, 12, 7, 3, 17, 11, 9, 10) * 3], 19)[0]
ROWS = jax.tree.map(lambda x: np.pad(x[:16], ((0, 16 - len(x[:16])), (0, 0))), ROWS)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (3, 1, 5, 2, 6, 4, 1, 7)]


@pytest.fixture(scope="module")
def layers_in_a_scan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "LAYERED", {})
        yield


def on(mesh: Mesh) -> Model:
    return Model(DECODER, sharding=make_sharding(mesh))


@functools.cache
def start():
    return tiny.to_host(Model(DECODER).init(jax.random.key(3)))


@functools.cache
def trained(mesh: Mesh):
    """Return (updated parameters, moments, metrics) of one step, on the host."""
    model = on(mesh)
    state = init_state(model, OPTIMIZER, tiny.place(model, start()), jax.random.key(0))
    state, metrics = lm_step(state, LmArguments(model=model, optimizer=OPTIMIZER, batch=tiny.rows(model, ROWS)))
    assert_placed(model, state)
    return tiny.to_host((state.params, state.opt_state[0].mu, metrics))


@functools.cache
def logprobs(mesh: Mesh):
    """Return the log-probs of the rows by a forward pass in the layout of training."""
    model = on(mesh)

    @jax.jit
    def found(params, rows):
        hidden = model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
        return model.token_stats(params, hidden[:, :-1], rows.tokens[:, 1:]).logprobs

    return tiny.to_host(found(tiny.place(model, start()), tiny.rows(model, ROWS)))


def sampled(mesh: Mesh):
    """Return the sampled tokens and their log-probs. The weights are placed as for training. `zero` is no rule of
    sampling, so meshes that differ only in it share programs."""
    model, sampler = on(mesh), on(dataclasses.replace(mesh, zero=3))
    assert model.sharding.generation.rules == sampler.sharding.generation.rules
    engine, sampling = Engine(sampler, 8, 24, bucket=8), Sampling(12, (64,), 1.0, 0, 1.0)
    found = tiny.sample(engine, tiny.place(model, start()), PROMPTS, jax.random.key(5), range(8), sampling)
    return tiny.to_host((found.tokens, found.logprobs))


@functools.cache
def sampled_on_one_device():
    return sampled(Mesh())


def assert_placed(model: Model, state) -> None:
    """Check that each device holds its share of every table and kernel, and no more."""
    mesh = model.sharding.mesh.shape
    whole, moments = state.params, state.opt_state[0].mu
    weights = mesh["fsdp"] if model.sharding.zero == 3 else 1
    for tree, fsdp in ((whole, weights), (moments, mesh["fsdp"])):
        for part, names in (("attention", ("query", "key", "value", "out")), ("mlp", ("gate", "up", "down"))):
            for name in names:
                leaf = tree["blocks"][part][name]
                assert leaf.addressable_shards[0].data.size * fsdp * mesh["tensor"] * mesh["pipeline"] == leaf.size, name
        for name in ("embedding", "unembedding"):
            assert tree[name].addressable_shards[0].data.size * fsdp * mesh["tensor"] == tree[name].size, name


@pytest.mark.variants(1)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_step_and_samples_equal_those_on_one_device(mesh):
    expected, found = trained(Mesh()), trained(dataclasses.replace(mesh, generation="tensor"))  # a rule of sampling only
    for name, have, want in zip(("params", "moments", "metrics"), found, expected, strict=True):
        # Adam's first step is nearly the sign of a gradient: near 0 it is only as exact as the gradient over eps.
        atol = 2e-5 if name != "params" else 2e-4
        largest = max(np.abs(x).max() for x in jax.tree.leaves(want))
        chex.assert_trees_all_close(have, want, rtol=2e-4, atol=atol * max(1e-3, largest))
    (expected_tokens, expected_logprobs), (tokens, sampled_logprobs) = sampled_on_one_device(), sampled(mesh)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(sampled_logprobs, expected_logprobs, atol=2e-5)


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", FORWARD)
def test_log_probs_without_gradients_equal_those_on_one_device(name):
    """On meshes that together have every axis and option. On the others, the loss and its gradients depend on log-probs."""
    expected = logprobs(Mesh())
    np.testing.assert_allclose(logprobs(MESHES[name]), expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


def test_the_page_on_meshes_lists_them_all():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "meshes.md").read_text()
    table = page.partition("## Tested meshes")[2]
    assert set(re.findall(r"^\| ([\w-]+) \|", table, re.M)) - {"mesh", "---"} == set(MESHES)
