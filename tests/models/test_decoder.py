"""The decoder against plain numpy loops, and causality verified by gradients."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models.attention.plain import attend
from jaxalign.models.decoder import Decoder
from jaxalign.models.layers import activate, rotate, turn
from tests import tiny


def numpy_rotate(x, position, base):
    """One head vector [h] at one position: pairs (i, i + h/2) rotated by position / base^(2i/h)."""
    half, out = len(x) // 2, np.zeros(len(x))
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def numpy_attend(q, k, v, mask):
    """Loops over rows, heads and queries, in float64. q [B, T, H, h]; k, v [B, S, K, h]; mask [B, T, S]."""
    B, T, H, h = q.shape
    group, out = H // k.shape[2], np.zeros(q.shape)
    for b, t, head in np.ndindex(B, T, H):
        seen = [s for s in range(k.shape[1]) if mask[b, t, s]]
        scores = np.array([q[b, t, head] @ k[b, s, head // group] for s in seen]) / np.sqrt(h)
        weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        out[b, t, head] = sum(w * v[b, s, head // group] for w, s in zip(weights, seen, strict=True))
    return out


def numpy_hidden(config, params, tokens, positions, mask):
    """The whole decoder in float64, layer by layer."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embedding"][tokens]
    for layer in range(config.layers):
        block = jax.tree.map(lambda leaf: leaf[layer], params["blocks"])  # noqa: B023
        normed, weights = norm(x, block["attention_norm"]["scale"]), block["attention"]
        q, k, v = (np.einsum("btd,dnh->btnh", normed, weights[name]) for name in ("query", "key", "value"))
        for array in (q, k):
            for b, t, n in np.ndindex(array.shape[:3]):
                array[b, t, n] = numpy_rotate(array[b, t, n], positions[b, t], config.rope_base)
        x = x + np.einsum("btnh,nhd->btd", numpy_attend(q, k, v, mask), weights["out"])
        normed, weights = norm(x, block["mlp_norm"]["scale"]), block["mlp"]
        gate = normed @ weights["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ weights["up"])) @ weights["down"]
    return norm(x, params["final_norm"]["scale"])


@pytest.fixture(scope="module")
def packed():
    """Two rows: three documents and padding; one document of five tokens and one of three."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 0, 1, 0], [0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    tokens = np.stack([rng.permutation(32)[:8] for _ in range(2)]).astype(np.int32)
    return tokens, positions, segments


def test_rotary_positions_rotate_each_pair_by_its_own_frequency():
    x = np.random.default_rng(1).normal(size=(2, 3, 2, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2], [5, 90, 1000]], np.int32)
    found = rotate(jnp.asarray(x), turn(jnp.asarray(positions), 100.0 ** (-jnp.arange(3) / 3)))
    for b, t, n in np.ndindex(2, 3, 2):
        np.testing.assert_allclose(found[b, t, n], numpy_rotate(x[b, t, n], positions[b, t], 100.0), atol=2e-4)


def test_a_rotated_product_depends_only_on_the_distance():
    q, k = np.random.default_rng(2).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    frequency = 10000.0 ** (-jnp.arange(4) / 4)

    def at(x, p):
        return rotate(jnp.asarray(x), turn(jnp.full((1, 1), p, jnp.int32), frequency))[0, 0, 0]

    np.testing.assert_allclose(at(q, 9) @ at(k, 4), at(q, 105) @ at(k, 100), atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_query_attention_equals_a_loop(heads, kv_heads):
    rng = np.random.default_rng(heads + kv_heads)
    q = rng.normal(size=(2, 3, heads, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 5, kv_heads, 4)).astype(np.float32)
    mask = rng.random((2, 3, 5)) < 0.6
    mask[:, :, 0] = True
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask)), numpy_attend(q, k, v, mask), atol=1e-5)


def test_a_query_that_sees_nothing_gives_finite_numbers():
    q, k, v = np.ones((3, 1, 2, 2, 4), np.float32)
    assert np.isfinite(attend(q, k, v, jnp.zeros((1, 2, 2), bool))).all()


def test_the_whole_decoder_equals_numpy(packed):
    """This covers norms, rotation, grouped heads, gated MLP, residuals and the order of the scanned layers."""
    tokens, positions, segments = packed
    params = tiny.host_params(scale=1.5)
    causal = np.tril(np.ones((8, 8), bool))[None] & (segments[:, :, None] == segments[:, None, :])
    expected = numpy_hidden(tiny.DECODER, params, tokens, positions, causal)
    found = jax.jit(tiny.model().hidden)(params, tokens, positions, segments)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def visible(model, params, tokens, positions=None, segments=None):
    """For one row of distinct tokens, bool [T, T]: whether the hidden state at t depends on the token at s, by gradients."""

    def states(table):
        return model.hidden({**params, "embedding": table}, tokens[None], positions, segments)[0]

    moved = np.asarray(jax.jit(jax.jacrev(states))(params["embedding"]))[:, :, tokens]  # [T, D, T, D]: distinct tokens
    return np.any(moved != 0, axis=(1, 3))


def test_each_position_sees_all_earlier_positions_and_no_later_one():
    tokens = np.array([3, 1, 4, 15, 9, 2], np.int32)
    seen = visible(tiny.model(), tiny.host_params(), tokens)
    np.testing.assert_array_equal(seen, np.tril(np.ones((6, 6), bool)))


def test_a_packed_document_sees_only_itself(packed):
    tokens, positions, segments = (x[:1] for x in packed)
    seen = visible(tiny.model(), tiny.host_params(), tokens[0], positions, segments)
    np.testing.assert_array_equal(seen, np.tril(segments[0][:, None] == segments[0][None, :]))


def test_packed_documents_equal_separate_ones(packed):
    tokens, positions, segments = packed
    model, params = tiny.model(), tiny.host_params()
    together = np.asarray(tiny.all_hidden(model, params, tokens, positions, segments))
    for row, segment in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]:
        inside = segments[row] == segment
        alone = tiny.hidden(model, params, tokens[row, inside])
        np.testing.assert_allclose(together[row, inside], alone, atol=1e-5)


def test_padding_at_the_end_changes_nothing_before_it():
    model, params = tiny.model(), tiny.host_params()
    tokens = np.array([[5, 6, 7]], np.int32)
    padded = np.array([[5, 6, 7, 31, 31]], np.int32)
    long, short = (np.asarray(tiny.all_hidden(model, params, x)) for x in (padded, tokens))
    np.testing.assert_allclose(long[:, :3], short, atol=1e-6)


def test_the_size_of_the_program_does_not_grow_with_depth():
    def size(layers):
        model = tiny.model(layers=layers)
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        return str(jax.make_jaxpr(model.hidden)(model.abstract(), tokens)).count("\n")

    assert size(1) == size(2) == size(16)


def test_depth_is_the_leading_axis_of_every_block_parameter():
    params = tiny.model(layers=5).abstract()
    assert all(leaf.shape[0] == 5 for leaf in jax.tree.leaves(params["blocks"]))


def test_layers_have_different_initial_values():
    query = tiny.host_params()["blocks"]["attention"]["query"]
    assert np.abs(query[0] - query[1]).max() > 0.1


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters_and_gradients(packed):
    tokens, positions, segments = packed
    params = tiny.host_params()
    model = tiny.model(compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.abstract())} == {jnp.dtype("float32")}
    hidden = tiny.all_hidden(model, params, tokens, positions, segments)
    assert hidden.dtype == jnp.bfloat16
    # bfloat16 has 8 bits: each of about 10 roundings adds an error of 2^-9, of values up to 4.
    full = tiny.all_hidden(tiny.model(), params, tokens, positions, segments)
    np.testing.assert_allclose(hidden.astype(np.float32), full, atol=10 * 2**-9 * 4)
    gradients = jax.jit(jax.grad(lambda p: model.hidden(p, tokens, positions, segments).astype(jnp.float32).sum()))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_float16_is_close_to_float32_and_has_float32_logits(packed):
    tokens, positions, segments = packed
    params, model = tiny.host_params(), tiny.model(compute_dtype="float16")
    hidden = tiny.all_hidden(model, params, tokens, positions, segments)
    assert hidden.dtype == jnp.float16 and model.logits(params, hidden).dtype == jnp.float32
    # As above, with 11 bits.
    full = tiny.all_hidden(tiny.model(), params, tokens, positions, segments)
    np.testing.assert_allclose(hidden.astype(np.float32), full, atol=10 * 2**-12 * 4)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_of_large_inputs_do_not_overflow_in_float16(name):
    """The x^3 in gelu_tanh would overflow above 40."""
    value, slope = jax.vmap(jax.value_and_grad(lambda x: activate(name, x)))(jnp.array([300.0, -300.0, 6e4], jnp.float16))
    assert value.dtype == jnp.float16
    np.testing.assert_array_equal(value, np.array([300.0, 0.0, 6e4], np.float16))
    np.testing.assert_array_equal(slope, [1, 0, 1])


@pytest.mark.parametrize(("field", "value", "message"), [
    ("kv_heads", 3, "model.heads is 4; it must be a multiple of model.kv_heads"),
    ("head_dim", 5, "model.head_dim is 5, but rotary positions rotate 5 of its dimensions; they need an even number"),
])
def test_invalid_sizes_are_reported_in_one_sentence(field, value, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(tiny.DECODER, **{field: value})


def test_an_unknown_head_is_refused():
    from flax import nnx

    with pytest.raises(ValueError, match="'lm', 'scalar' or 'lm_scalar'"):
        Decoder(tiny.DECODER, "both", rngs=nnx.Rngs(0))


@pytest.mark.medium
@pytest.mark.cpu  # On a GPU this small model needs no less.
def test_remat_gives_the_same_gradients_in_less_memory():
    tokens = np.random.default_rng(0).integers(0, 32, (2, 16)).astype(np.int32)
    params = tiny.model(layers=6).init(jax.random.key(0))
    found, memory = [], []
    for remat in (False, True):
        model = tiny.model(layers=6, remat=remat)
        compiled = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.hidden(p, tokens))))).lower(params).compile()  # noqa: B023
        found.append(compiled(params))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    plain, again = found
    chex.assert_trees_all_close(again, plain, rtol=1e-7, atol=1e-5)
    assert memory[1] < 0.7 * memory[0]
