"""Selection of the attention implementation, and errors."""

from __future__ import annotations

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.models.attention import blocked as attention_blocked
from jaxalign.models.attention import plain as attention_plain
from jaxalign.models.attention.dispatch import kind_of_attention
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding, make_sharding, one_device
from tests import tiny

BFLOAT16 = dataclasses.replace(tiny.DECODER, layers=2, compute_dtype="bfloat16", head_dim=64)


def on(monkeypatch, platform: str, kind: str = "", version: str = "") -> None:
    """Makes the device of every mesh appear to be of another platform."""
    device = types.SimpleNamespace(platform=platform, device_kind=kind, client=types.SimpleNamespace(platform_version=version))
    monkeypatch.setattr(Sharding, "device", device)


def kind(config, T: int = 256, setting: str = "auto") -> str:
    return kind_of_attention(dataclasses.replace(config, attention=setting), one_device(), 2, T)


def test_a_cpu_uses_plain_attention(monkeypatch):
    on(monkeypatch, "cpu")
    assert kind(BFLOAT16, 4096) == "plain"
    with pytest.raises(UserError, match="'fused', but the platform, cpu, has no fused kernel .* set it to 'auto'"):
        kind(BFLOAT16, setting="fused")


def test_a_tpu_uses_splash_attention_for_rows_of_a_block_or_more(monkeypatch):
    on(monkeypatch, "tpu")
    capped = dataclasses.replace(tiny.DECODER, attention_softcap=30.0, window=4)
    assert kind(tiny.DECODER) == kind(capped) == kind(BFLOAT16, 128) == kind(BFLOAT16, 100, "fused") == "splash"
    assert kind(BFLOAT16, 100) == kind(BFLOAT16, setting="plain") == "plain"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"compute_dtype": "float32"}, "computes in bfloat16 or float16, and model.compute_dtype is float32"),
    ({"attention_softcap": 30.0}, "no soft cap"),
    ({"head_dim": 256}, "up to 128; this model's is 256"),
    ({"head_dim": 20}, "a multiple of 8 up to 128; this model's is 20"),
])
def test_an_nvidia_gpu_uses_cudnn_if_it_supports_the_model(monkeypatch, changes, reason):
    on(monkeypatch, "gpu", "Tesla V100-SXM2-16GB", "PJRT C API\ncuda 12090")
    config = dataclasses.replace(BFLOAT16, **changes)
    assert kind(BFLOAT16) == kind(dataclasses.replace(BFLOAT16, window=9)) == "cudnn" and kind(config) == "plain"
    with pytest.raises(UserError, match=reason):
        kind(config, setting="fused")


def test_another_gpu_uses_plain_attention(monkeypatch):
    on(monkeypatch, "gpu", "AMD Instinct MI300X", "PJRT C API\nrocm 60300")
    assert kind(BFLOAT16) == "plain"
    with pytest.raises(UserError, match="not an NVIDIA GPU"):
        kind(BFLOAT16, setting="fused")


@pytest.mark.mesh
def test_rows_split_over_context_use_ring_attention_in_training_and_not_in_sampling():
    sharding = make_sharding(Mesh(context=2))
    assert kind_of_attention(tiny.DECODER, sharding, 2, 64) == "ring"
    assert kind_of_attention(tiny.DECODER, sharding.generation, 2, 64) == "plain"
    assert kind_of_attention(tiny.DECODER, sharding, 2, 64, keep_cache=True) == "plain"
    with pytest.raises(UserError, match="'fused', but config.mesh.context splits the rows.*'auto' .ring attention."):
        kind_of_attention(dataclasses.replace(tiny.DECODER, attention="fused"), sharding, 2, 64)


def test_an_unavailable_kind_of_attention_is_refused():
    with pytest.raises(UserError, match="config.model.attention is 'fused'"):
        tiny.model(attention="fused").hidden(tiny.host_params(), np.zeros((1, 4), np.int32))


@pytest.mark.mesh
def test_plain_attention_also_works_for_rows_split_over_context():
    """It is only slow: the compiler gathers keys and values."""
    tokens = np.random.default_rng(0).integers(0, 32, (2, 11)).astype(np.int32)
    split = Model(dataclasses.replace(tiny.DECODER, attention="plain"), sharding=make_sharding(Mesh(context=2)))
    found = jax.jit(split.hidden)(tiny.place(split, tiny.host_params()), tokens)
    np.testing.assert_allclose(found, jax.jit(tiny.model().hidden)(tiny.host_params(), tokens), atol=1e-5)


@pytest.mark.medium
@pytest.mark.variants(2)
@pytest.mark.parametrize(("local", "documents"), [(None, 1), (None, 4), (False, 3), (True, 9)])
def test_attention_in_blocks_of_queries_equals_the_formula(local, documents):
    """Rows of several blocks with documents of any length, against float64 numpy for one query at a time; the gradient against
    that of all queries together."""
    B, T, H, K, h, window = 2, 201, 4, 2, 4, 70
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K))
    segments = np.sort(rng.integers(1, 1 + documents, (B, T)), axis=1).astype(np.int32)
    layers = (False, False) if local is None else (True, False)
    config = dataclasses.replace(tiny.DECODER, head_dim=h, window=window, local_layers=layers)
    attend = attention_blocked.blocked_attention(config, (B, T), segments)
    found = jax.jit(attend)(q, k, v, None if local is None else np.bool_(local))
    for b, t, head in np.ndindex(B, T, H):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and (not local or t - s < window)]
        scores = k[b, seen, head // 2].astype(np.float64) @ q[b, t, head] * config.scale
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(found[b, t, head], weights / weights.sum() @ v[b, seen, head // 2], atol=1e-5)
    given = None if local is None else np.bool_(local)

    def total(attend):
        return jax.jit(jax.grad(lambda *x: (attend(*x, given) ** 2).sum(), (0, 1, 2)))(q, k, v)

    at_once = attention_plain.plain_attention(config, (B, T), segments)
    chex.assert_trees_all_close(total(attend), total(at_once), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(("stem", "branches", "way"), [(20, (15, 30), 0), (100, (60, 90), 3)])
def test_a_branch_sees_its_stem_and_not_the_other_branch(stem, branches, way):
    """Rows of documents with two branches, against the formula on each branch after its stem, without other documents."""
    B, T, H, K, h = 2, 800, 4, 2, 4
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K))
    whole = stem + sum(branches)
    one = np.repeat([0, 1, 2], [stem, *branches]) * attention_plain.STEM
    documents = T // whole
    segments = np.zeros((B, T), np.int32)
    segments[:, : documents * whole] = np.repeat(np.arange(1, documents + 1), whole) + np.tile(one, documents)
    config = dataclasses.replace(tiny.DECODER, head_dim=h)
    assert attention_blocked.way_of(jnp.asarray(segments), attention_blocked.bands_of(T)) == way
    alone = jax.jit(attention_plain.plain_attention(config, (B, stem + max(branches)), None))
    for make in (attention_blocked.blocked_attention, attention_plain.plain_attention):
        found = np.asarray(jax.jit(make(config, (B, T), jnp.asarray(segments)))(q, k, v, None))
        for first in range(0, documents * whole, whole):
            for number, length in enumerate(branches):
                start = first + stem + sum(branches[:number])
                own = np.r_[first : first + stem, start : start + length]
                given = (np.pad(x[:, own], ((0, 0), (0, max(branches) - length), (0, 0), (0, 0))) for x in (q, k, v))
                np.testing.assert_allclose(found[:, own], np.asarray(alone(*given, None))[:, : len(own)], atol=1e-5)


@functools.cache
def values_and_gradients(make, cap: float | None):
    """A jitted function of (q, k, v, segments), shared by all lengths of documents: (gradients, values)."""
    config = dataclasses.replace(tiny.DECODER, head_dim=4, attention_softcap=cap)

    @jax.jit
    def found(q, k, v, segments):
        attend, counted = make(config, segments.shape, segments), (segments > 0)[..., None, None]

        def loss(*x):
            values = counted * attend(*x, None)
            return jnp.sum(values**2), values

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    return found


@pytest.mark.medium
@pytest.mark.variants(6)
@pytest.mark.parametrize(("lengths", "way"), [
    ([60] * 13, 0), ([64, 128, 128], 0), ([30, 128, 128], 1), ([40, 193, 60], 2), ([128, 128, 60, 60, 200], 2), ([700, 100], 3),
    ([40, 0, 400], 3), ([0, 0, 0, 0], 0),
])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_documents_of_any_length_use_the_narrowest_window_that_holds_them(lengths, way, cap):
    """Rows of 800 tokens, the second with one short document, and heads that share keys: values and gradients against all
    queries together. A length of 0 stands for padding of 60 tokens, which does not count."""
    B, T, H, K, h = 2, 800, 4, 2, 4
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K))
    segments = np.zeros((B, T), np.int32)
    row = np.concatenate([np.full(length or 60, number + 1 if length else 0) for number, length in enumerate(lengths)])[:T]
    segments[0, : len(row)], segments[1, :30] = row, 1
    bands = attention_blocked.bands_of(T)
    assert bands == (1, 2, 3) and attention_blocked.way_of(jnp.asarray(segments), bands) == way
    found, expected = (
        values_and_gradients(make, cap)(q, k, v, segments)
        for make in (attention_blocked.blocked_attention, attention_plain.plain_attention)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
