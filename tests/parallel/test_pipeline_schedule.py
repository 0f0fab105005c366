"""A pipeline with stages, micro-batches and repeats equals sequential layers and takes the number of steps in the formula."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.architecture import Experts
from jaxalign.parallel import pipeline
from jaxalign.parallel.sharding import make_sharding
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.state import init_state
from tests import tiny
from tests.steps.batches import ROWS

RNG = np.random.default_rng(1)
LAYERS, X, ROW = (RNG.normal(size=s).astype(np.float32) for s in ((8, 6, 6), (16, 6), (16,)))
SCHEDULES = [(2, 1, 2), (4, 1, 8), (2, 2, 4), (4, 2, 4), (2, 4, 2), (4, 1, 1)]


def stage(layers, x, row):
    """Each layer is x <- tanh(x W + row). Also return the sum of the squares of `row`, once per layer."""
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + row[:, None]), None), x, layers)[0]
    return x, len(layers) * jnp.sum(row**2)


def by_hand(layers, x, row):
    for w in layers:
        x = jnp.tanh(x @ w + row[:, None])
    return x


def made(stages, repeats=1, micro_batches=0, **sizes):
    settings = Mesh(pipeline=stages, pipeline_repeats=repeats, pipeline_micro_batches=micro_batches, **sizes)
    return make_sharding(settings)


def loss(run):
    def value(layers, x, row):
        out = run(layers, x, row)
        out, beside = out if isinstance(out, tuple) else (out, None)
        return jnp.sum(jnp.sin(out) * np.arange(16)[:, None]), beside

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))


@functools.cache
def sequential():
    return tiny.to_host(loss(by_hand)(LAYERS, X, ROW))


@pytest.mark.parametrize(("stages", "repeats", "micro_batches"), SCHEDULES)
def test_values_gradients_and_sums_equal_those_of_sequential_layers(stages, repeats, micro_batches):
    sharding = made(stages, repeats, micro_batches, data=2)
    (value, beside), gradients = loss(lambda *given: pipeline.run_stages(sharding, stage, *given))(LAYERS, X, ROW)
    (expected, _), wanted = sequential()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    chex.assert_trees_all_close(gradients, wanted, rtol=2e-5, atol=2e-5 * max(np.abs(x).max() for x in jax.tree.leaves(wanted)))
    np.testing.assert_allclose(beside, 8 * np.sum(ROW**2), rtol=1e-5)


@pytest.mark.parametrize(("stages", "repeats", "micro_batches"), SCHEDULES)
def test_a_pass_takes_the_number_of_steps_in_the_formula(stages, repeats, micro_batches):
    """In R M of the R M + S - 1 steps a stage has work: the bubble is (S - 1) / (R M + S - 1)."""
    sharding = made(stages, repeats, micro_batches)
    traced = str(jax.make_jaxpr(lambda *given: pipeline.run_stages(sharding, stage, *given))(LAYERS, X, ROW))
    steps = repeats * micro_batches + stages - 1
    assert f"length={steps}\n" in traced or f"length={steps} " in traced
    assert pipeline.bubble(stages, micro_batches, repeats) == pytest.approx(1 - repeats * micro_batches / steps)


def test_a_stage_holds_only_its_layers_and_sends_activations():
    sharding = made(4, 1, 4)
    placed = jax.device_put(LAYERS, sharding.named(("layers", None, None)))
    run = jax.jit(lambda *given: pipeline.run_stages(sharding, stage, *given))
    text = run.lower(placed, X, ROW).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text and "f32[8,6,6]" not in text.split("ENTRY")[0]


def test_impossible_schedules_are_refused():
    with pytest.raises(UserError, match=r"pipeline \(4\) x pipeline_repeats \(4\) = 16; it must divide the layers \(8\)"):
        pipeline.run_stages(made(4, 4, 4), stage, LAYERS, X, ROW)
    with pytest.raises(UserError, match=r"as many micro-batches as stages \(4\), but 2 rows make 2"):
        pipeline.run_stages(made(4, 2, 4), stage, LAYERS, X[:2], ROW[:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"experts": Experts(4, 2)},
        {"window": 3, "local_layers": (True, False, True, False), "attention_softcap": 5.0, "remat": True},
        {"lora": LoraAdapters(2, 4.0, ("*",))},
    ],
    ids=["experts", "local-layers", "lora"],
)
def test_every_kind_of_layer_passes_through_the_pipeline(changes):
    """The loads of experts are summed over the micro-batches; local layers and adapters stay with their layers."""
    changes = dict(changes)
    lora = changes.pop("lora", None)
    found = []
    for mesh in (Mesh(), Mesh(pipeline=2, data=2, tensor=2, pipeline_repeats=2)):
        model = dataclasses.replace(tiny.model(None, layers=4, **changes), sharding=make_sharding(mesh))
        params, frozen = tiny.place(model, tiny.to_host(tiny.model(None, layers=4, **changes).init(jax.random.key(0)))), None
        if lora is not None:
            model, frozen = dataclasses.replace(model, lora=lora), params
            fresh = jax.tree.map(lambda x: x + 0.05, model.init_adapters(frozen, jax.random.key(1)))
            params = jax.device_put(fresh, model.shardings())
        state = init_state(model, optax.sgd(1.0), params, jax.random.key(0))
        given = LmArguments(
            model=model, optimizer=optax.sgd(1.0), batch=tiny.rows(model, ROWS), frozen=frozen, balance_coef=0.1
        )
        state, metrics = lm_step(state, given)
        found.append(tiny.to_host((state.params, metrics)))
    chex.assert_trees_all_close(found[1], found[0], rtol=1e-4, atol=2e-6)
