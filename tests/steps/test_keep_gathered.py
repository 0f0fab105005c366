"""`mesh.keep_gathered` changes how often weights are sent, and results only by rounding."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.architecture import Experts
from jaxalign.models.language_model import load_model
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import AXES
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.hlo import collectives
from jaxalign.planner.hlo_text import parse
from jaxalign.records import PackedBatch
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.state import abstract_state, init_state
from tests import tiny
from tests.steps.batches import DECODER, ROWS

SGD = optax.sgd(1.0)  # the update subtracts the gradient


def step(model: Model, micro_batches: int, frozen=None, params=None):
    """(the gradients, the metrics) of one step of supervised fine-tuning, on the host."""
    params = tiny.place(model, model.init(jax.random.key(0)) if params is None else params)
    before = tiny.to_host(params)
    batch = tiny.rows(model, ROWS)
    given = LmArguments(model=model, optimizer=SGD, micro_batches=micro_batches, batch=batch, frozen=frozen)
    state, metrics = lm_step(init_state(model, SGD, params, jax.random.key(0)), given)
    return jax.tree.map(np.subtract, before, tiny.to_host(state.params)), tiny.to_host(metrics)


def on(mesh: Mesh, keep: str, **changes) -> Model:
    return Model(dataclasses.replace(DECODER, **changes), sharding=make_sharding(dataclasses.replace(mesh, keep_gathered=keep)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [(Mesh(data=2, fsdp=2, tensor=2), {"tie_embeddings": True, "experts": Experts(count=4, per_token=2)}),
     (Mesh(fsdp=2, pipeline=2), {})],
    ids=["tied tables and experts", "pipeline"],
)
def test_gradients_are_equal(mesh, changes):
    expected, found = (step(on(mesh, keep, **changes), 2) for keep in ("never", "always"))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0])) > 1e-3
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_bfloat16_weights_are_float32_and_equal_up_to_their_rounding():
    expected, found = (step(on(Mesh(fsdp=4), keep, compute_dtype="bfloat16"), 2) for keep in ("never", "always"))
    for one, other in zip(*map(jax.tree.leaves, (found[0], expected[0])), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=2**-6 * np.abs(other).max())


@pytest.mark.slow
def test_adapters_on_a_gathered_base_have_the_same_gradients():
    """The kernels of one base have three formats."""
    lora, results = LoraAdapters(rank=2, alpha=3.0, targets=("*",)), []
    for keep in ("never", "always"):
        base = on(Mesh(fsdp=4), keep, embed=64, mlp=64)
        model = dataclasses.replace(base, lora=lora)
        start = tiny.to_host(base.init(jax.random.key(1)))
        frozen, int8, nf4 = (quantise(tiny.place(base, start), kind) for kind in ("bfloat16", "int8", "nf4"))
        for part, first, second in (("attention", "key", "out"), ("mlp", "up", "down")):
            frozen["blocks"][part][first] = int8["blocks"][part][first]
            frozen["blocks"][part][second] = nf4["blocks"][part][second]
        params = jax.tree.map(lambda x: x + 0.1, model.init_adapters(frozen, jax.random.key(2)))
        results.append(step(model, 2, frozen, params))
    expected, found = results
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def sent(keep: str) -> float:
    """The bytes of the weights that a step of two micro-batches gathers, by the compiled program."""
    model = on(Mesh(fsdp=8), keep)
    shape = jax.ShapeDtypeStruct((16, 16), jnp.int32, sharding=model.sharding.batch)
    given = LmArguments(
        model=model, optimizer=SGD, micro_batches=2, batch=PackedBatch(shape, shape, shape, shape.update(dtype=jnp.float32))
    )
    compiled = lm_step.lower(abstract_state(model, SGD), given).compile()
    found = collectives(parse(compiled.as_text()), {axis: model.sharding.mesh.shape[axis] for axis in AXES})
    return sum(one.result * one.times for one in found if one.kind == "all-gather")


@pytest.mark.medium
def test_each_weight_is_gathered_once_instead_of_in_each_pass_and_micro_batch():
    model = on(Mesh(fsdp=8), "always")
    split = [leaf.size for leaf in jax.tree.leaves(model.abstract()) if "fsdp" in jax.tree.leaves(tuple(leaf.sharding.spec))]
    tables = 2 * DECODER.vocab * DECODER.embed
    assert sent("always") == 4 * sum(split)
    # The kernels forward and backward for two micro-batches. The tables are gathered once in any case.
    assert sent("never") == 4 * (4 * (sum(split) - tables) + tables)


@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, keep_gathered="auto"), Mesh(data=2, keep_gathered="always"),
                                  Mesh(fsdp=2, zero=2, keep_gathered="always")])
def test_in_python_a_mesh_on_which_nothing_can_be_chosen_or_kept_is_refused(mesh, tmp_path):
    with pytest.raises(UserError, match="mesh.keep_gathered is "):
        load_model(tmp_path, mesh)
