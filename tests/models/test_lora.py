"""Adapters on a frozen base: they equal merged weights and `peft`, on every mesh, and the base is unchanged."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models import model as model_module
from jaxalign.models.adapters import lora
from jaxalign.models.adapters.lora import LoraAdapters, join, merge, strip_frozen, trained
from jaxalign.models.cache import empty_rings
from jaxalign.models.model import Model
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import abstract_state, init_state
from tests import tiny
from tests.adapters import TOKENS, adapted, frozen
from tests.rings import ring_of

ALL = ("*",)
LORA = LoraAdapters(rank=3, alpha=5.0, targets=ALL)
VARIANTS = {
    "lora": LORA,
    "rslora": dataclasses.replace(LORA, rank_stabilised=True),
    "dora": dataclasses.replace(LORA, dora=True),
    "some": dataclasses.replace(LORA, targets=("attention.*", "down_proj"), dora=True),
}
# Two computations of the same product of a few dozen float32 numbers, through two layers.
ROUNDING = dict(rtol=2e-5, atol=2e-5)


def logits(model: Model, params):
    return np.asarray(tiny.all_logits(model, params, TOKENS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_pass_equals_that_of_merged_weights(variant):
    model, params = adapted(VARIANTS[variant])
    merged = merge(model.lora, params)
    assert "adapters" not in merged and jax.tree.structure(merged) == jax.tree.structure(tiny.host_params())
    found = logits(model, params)
    np.testing.assert_allclose(found, logits(model.base, merged), **ROUNDING)
    assert np.abs(found - logits(model.base, frozen(params))).max() > 0.1  # the adapters have an effect


@pytest.mark.parametrize("variant", VARIANTS)
def test_fresh_adapters_change_nothing(variant):
    model = dataclasses.replace(tiny.model(), lora=VARIANTS[variant])
    base = tiny.host_params()
    fresh = model.init_adapters(base, jax.random.key(3))
    # DoRA divides the norm of the weights by the same norm; one is computed here, the other in the forward pass.
    bound = ROUNDING if model.lora.dora else dict(rtol=0, atol=0)
    np.testing.assert_allclose(logits(model, join(base, fresh)), logits(model.base, base), **bound)
    if variant == "some":  # The settings of adapters that are absent change nothing.
        np.testing.assert_array_equal(logits(model, base), logits(model.base, base))
    a = np.asarray(fresh["adapters"]["attention"]["out"]["a"])
    assert a.shape == (2, 4, 4, 3) and a.std() > 0 and np.abs(a).max() <= 16**-0.5
    assert not np.any(np.asarray(fresh["adapters"]["attention"]["out"]["b"]))


def test_strip_frozen_is_the_inverse_of_join():
    """Sharing is by identity: equal copies are not part of the base."""
    base, own = tiny.host_params(), {"adapters": {"a": np.ones(3)}}
    joined = jax.tree.map(lambda x: x, join(base, own))  # the same arrays in other containers
    assert strip_frozen(base, joined) == own and strip_frozen(base, base) == {}
    assert strip_frozen(None, joined) is joined and strip_frozen(base, None) is None
    copied = jax.tree.map(np.copy, base)
    assert strip_frozen(base, copied) == copied


def test_own_parameters_are_only_the_adapters_and_the_head():
    """The optimizer's state covers the same parameters, with two moments each."""
    for head, extra in (("lm", 0), ("scalar", 1), ("lm_scalar", 1)):
        model = dataclasses.replace(tiny.model(head=head), lora=VARIANTS["dora"])
        fresh = model.init_adapters(tiny.host_params(), jax.random.key(0))
        assert len(jax.tree.leaves(fresh)) == 7 * 3 + extra
        chex.assert_trees_all_equal_shapes_and_dtypes(fresh, model.abstract())
        optimizer = make_optimizer(tiny.Optimizer(), 10)
        state = init_state(model, optimizer, fresh, jax.random.key(0))
        numbers = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert sum(leaf.size for leaf in numbers) == 2 * sum(leaf.size for leaf in jax.tree.leaves(fresh))
        assert jax.tree.structure(abstract_state(model, optimizer)) == jax.tree.structure(state)


def test_patterns_select_layers_and_a_pattern_without_matches_is_refused():
    blocks = tiny.host_params()["blocks"]

    def chosen(*targets):
        return LoraAdapters(2, 1.0, targets).adapted(blocks)

    assert chosen("q_proj", "attention.value") == [("attention", "query"), ("attention", "value")]
    assert chosen("mlp.*") == [("mlp", "gate"), ("mlp", "up"), ("mlp", "down")]
    assert len(chosen("*")) == 7
    with pytest.raises(UserError, match="config.lora.targets contains 'q_prj', which matches no linear layer.*attention.query"):
        chosen("q_proj", "q_prj")


@pytest.mark.variants(1)
@pytest.mark.parametrize(("variant", "mesh"), [("rslora", (2, 2, 2)), ("dora", (1, 4, 2))])
def test_logits_and_gradients_on_a_mesh_equal_those_on_one_device(variant, mesh):
    found = {}
    for where in (None, mesh):
        model, params = adapted(VARIANTS[variant], where, "lm")
        base = tiny.place(model.base, frozen(params))
        own = tiny.place(model, trained(params))

        @jax.jit
        def value_and_gradient(own, base, model=model):
            def loss(own):
                out = model.logits(join(base, own), model.hidden(join(base, own), TOKENS))
                return jnp.mean(jnp.square(out)), out

            return jax.value_and_grad(loss, has_aux=True)(own)

        (_, out), gradients = value_and_gradient(own, base)
        if where is not None:
            same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), own, model.shardings())
            assert all(jax.tree.leaves(same))
        found[where] = tiny.to_host((out, gradients))
    # Logits up to 3 and gradients above 1e-3, on processors of several kinds.
    chex.assert_trees_all_close(found[mesh], found[None], rtol=1e-4, atol=3e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(found[None][1]))


@pytest.mark.parametrize("layered", [True, False])
def test_cached_decoding_applies_the_adapters(layered, monkeypatch):
    """Prefill of five tokens followed by single tokens equals the full forward pass. DoRA's adapters contain those of LoRA."""
    model, params = adapted(VARIANTS["dora"])
    expected = logits(model, params)
    if not layered:
        monkeypatch.setattr(model_module, "LAYERED", {})

    @jax.jit
    def decoded(params):
        def step(cache, t):
            hidden, cache = model.decode(params, jnp.asarray(TOKENS)[:, t], jnp.full(4, t), cache, t)
            return cache, model.logits(params, hidden)

        hidden, cache = model.prefill(params, TOKENS[:, :5])
        cache = ring_of(model, cache, np.full(4, 5), 9)
        following = jax.lax.scan(step, cache, jnp.arange(5, 9))[1]
        return jnp.concatenate([model.logits(params, hidden), jnp.swapaxes(following, 0, 1)], axis=1)

    np.testing.assert_allclose(decoded(params), expected, **ROUNDING)


def test_decoding_computes_the_norms_of_dora_once_before_its_loop(monkeypatch):
    model, params = adapted(VARIANTS["some"])
    ratio, traced = lora.dora_ratio, []
    monkeypatch.setattr(lora, "dora_ratio", lambda kernel, own: traced.append(kernel.shape) or ratio(kernel, own))

    def step(params):
        decoding = model.decoding(params)
        assert len(traced) == 5  # Four of attention and one of the MLP, of both layers together.
        return decoding.step(TOKENS[:, 0], np.zeros(4, np.int32), decoding.begin((empty_rings(model.abstract_cache(4, 8)),)), 0)

    jax.eval_shape(step, params)
    assert len(traced) == 5
