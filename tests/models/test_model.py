"""A decoder as pure functions: axes, shapes, initial values, cache, heads."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.models import model as model_module
from jaxalign.models.model import scalar_from_lm
from jaxalign.parallel.sharding import RULES
from tests import tiny
from tests.rings import ring_of

VARIANTS = [("lm", True), ("lm", False), ("scalar", True)]


@pytest.mark.parametrize(("head", "tied"), VARIANTS)
def test_every_parameter_names_all_its_axes(head, tied):
    model = tiny.model(head=head, tie_embeddings=tied)
    shapes, axes = model.abstract(), model.axes()

    def is_names(x):
        return isinstance(x, tuple)

    assert jax.tree.structure(axes, is_leaf=is_names) == jax.tree.structure(shapes)
    for names, leaf in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True):
        assert len(names) == leaf.ndim and set(names) <= set(RULES)
    assert all(names[0] == "layers" for names in jax.tree.leaves(axes["blocks"], is_leaf=is_names))
    sizes = {"vocab": 32, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24, "layers": 2, "norm": 16}
    for names, leaf in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True):
        assert leaf.shape == tuple(sizes[name] for name in names)


@pytest.mark.parametrize(("head", "tied"), VARIANTS)
def test_a_model_has_exactly_its_heads(head, tied):
    names = set(tiny.model(head=head, tie_embeddings=tied).abstract())
    extra = {("lm", True): set(), ("lm", False): {"unembedding"}, ("scalar", True): {"score"}}[head, tied]
    assert names == {"embedding", "blocks", "final_norm"} | extra


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_fresh_parameters_match_the_abstract_ones_and_are_equal_on_any_mesh(mesh):
    model = tiny.model(mesh)
    params = model.init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(params, model.abstract())
    chex.assert_trees_all_equal(tiny.to_host(params), tiny.host_params())
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, params) == model.shardings()


def test_initial_sizes():
    """Normal with standard deviation 1/sqrt(fan in); outputs into the residual stream are smaller by sqrt(2 L); norms are 1;
    the scalar head has 1/sqrt(D + 1) (Stiennon et al. 2020)."""
    model = tiny.model(head="scalar", embed=256, mlp=512, vocab=512, layers=2)
    params = tiny.to_host(model.init(jax.random.key(1)))
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    expected = [
        (params["embedding"], 256**-0.5), (attention["query"], 256**-0.5), (attention["out"], 16**-0.5 / 2),
        (mlp["gate"], 256**-0.5), (mlp["down"], 512**-0.5 / 2), (params["score"], 257**-0.5),
    ]
    for found, deviation in expected:
        # Four standard errors; the standard error of a standard deviation is s / sqrt(2 n).
        assert abs(found.std() - deviation) < 4 * deviation / np.sqrt(2 * found.size)
    np.testing.assert_array_equal(params["final_norm"]["scale"], np.ones(256))


def test_an_untied_head_has_its_own_weight():
    model = tiny.model(tie_embeddings=False)
    params = model.init(jax.random.key(0))
    assert model.unembedding(params) is params["unembedding"]
    tied = tiny.model()
    params = tiny.host_params()
    np.testing.assert_array_equal(tied.unembedding(params), params["embedding"].T)


@pytest.mark.medium
@pytest.mark.parametrize(("layered", "once"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_and_cached_decode_equal_the_full_forward(dtype, layered, once, monkeypatch):
    """Ragged prompts of 5, 2 and 1 tokens, continued token by token, with a ring per layer or one for all layers in a scan. The
    weights of unrolled layers are unstacked before the loop or in it."""
    monkeypatch.setattr(model_module, "LAYERED", dict.fromkeys(("cpu", "gpu"), 16) if layered else {})
    monkeypatch.setattr(model_module, "unstacks", lambda model, params: once)
    model, params = tiny.model(compute_dtype=dtype), tiny.host_params()
    rng = np.random.default_rng(0)
    length, P, N = np.array([5, 2, 1], np.int32), 5, 4
    whole = rng.integers(0, 32, (3, P + N)).astype(np.int32)
    prompts = np.where(np.arange(P)[None] < length[:, None], whole[:, :P], 0)
    hidden, cache = jax.jit(model.prefill)(params, prompts)
    full = jax.jit(model.hidden)(params, whole)
    atol = 1e-5 if dtype == "float32" else 0.1  # bfloat16: about ten roundings by 2^-9 of values up to 4
    for b in range(3):
        np.testing.assert_allclose(
            hidden[b, : length[b]].astype(np.float32), full[b, : length[b]].astype(np.float32), atol=atol
        )
    cache, decode = ring_of(model, cache, length, P + N, P), jax.jit(model.decode)
    for n in range(N):
        at = length + n
        tokens = whole[np.arange(3), at]
        step, cache = decode(params, tokens, at, cache, P + n)
        shapes = [(layers.keys.shape, layers.values.shape) for layers in cache[0]]
        assert shapes == [((count, 3, 2, 4, P + N), (count, 3, 2, P + N, 4)) for count in ((1, 1) if layered else (2,))]
        assert cache[0][0].keys.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(step.astype(np.float32), full[np.arange(3), at].astype(np.float32), atol=atol)


def test_a_model_with_a_scalar_head_reuses_the_trunk():
    lm, scalar = tiny.host_params(), tiny.host_params("scalar", seed=1)
    params = scalar_from_lm(lm, scalar)
    assert set(params) == {"embedding", "blocks", "final_norm", "score"}
    assert params["blocks"] is lm["blocks"] and params["score"] is scalar["score"]
    hidden = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    scores = tiny.model(head="scalar").scores(params, jnp.asarray(hidden, jnp.bfloat16))
    assert scores.dtype == jnp.float32 and scores.shape == (2, 3)
    np.testing.assert_allclose(scores, np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float32) @ scalar["score"],
                               atol=1e-5)


def test_models_are_compared_by_value():
    """Equal models share a key of the compile cache; other sizes, heads or meshes have another."""
    assert tiny.model() == tiny.model() and hash(tiny.model((2, 2, 2))) == hash(tiny.model((2, 2, 2)))
    others = [tiny.model(layers=1), tiny.model().with_head("scalar"), tiny.model((2, 2, 2)), tiny.model((8, 1, 1))]
    assert len({tiny.model(), *others}) == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.model().head = "scalar"
