"""Log-probabilities, entropies and divergences of LM heads, computed in chunks so that [B, T, V] logits never exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxalign.algorithms.kl import full_kl
from jaxalign.models.layers import softcap
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.zigzag import context_size

CHUNK_FLOATS = 1 << 22  # The maximum number of logits on a device (16 MB in float32); a chunk has at least one position.
USED_CHUNKS = 8  # The minimum number of chunks if the number of used positions is known only at run time.
_APART = "batch", "length"  # Logical axes of the partial sums of `_no_sum`, before those of the weight.


class TokenStats(NamedTuple):
    """The log-probability of the target token and the entropy of the whole distribution, in nats; each float32 [B, T]."""

    logprobs: jax.Array
    entropy: jax.Array


def lm_logits(hidden, unembedding, cap: float | None = None) -> jax.Array:
    """float32 [..., V]: hidden [..., D] times unembedding [D, V] of the same dtype, soft-capped if `cap` is given."""
    chex.assert_shape(unembedding, (hidden.shape[-1], None))
    return softcap(jnp.einsum("...d,dv->...v", hidden, unembedding, preferred_element_type=jnp.float32), cap)


class PositionChunks(NamedTuple):
    """Positions [B, T] in `chunks` chunks, each with `size` positions of each of the `parts` of a row."""

    sharding: Sharding
    T: int
    parts: int
    chunks: int
    size: int

    def cut(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] to [chunks, B, parts * size, ...]: each chunk takes `size` positions from each of the parts of T."""
        B, inner, rest = x.shape[0], x.shape[2:], (None,) * (x.ndim - 2)
        x = jnp.pad(x, ((0, 0), (0, self.parts * self.chunks * self.size - self.T)) + ((0, 0),) * len(rest))
        if self.parts > 1:
            x = self.sharding.constrain(x, ("batch", "length", *rest))
        x = jnp.moveaxis(x.reshape(B, self.parts, self.chunks, self.size, *inner), 2, 0)
        x = x.reshape(self.chunks, B, self.parts * self.size, *inner)
        return self.sharding.constrain(x, (None, "batch", "length", *rest)) if self.parts > 1 else x

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        B, inner = x.shape[1], x.shape[3:]
        x = jnp.moveaxis(x.reshape(self.chunks, B, self.parts, self.size, *inner), 0, 2)
        x = x.reshape(B, self.parts * self.chunks * self.size, *inner)
        if self.parts > 1:
            x = self.sharding.constrain(x, ("batch", "length", *(None,) * len(inner)))
        return x[:, : self.T]


def split_positions(T: int, most: int, sharding: Sharding, used) -> tuple[PositionChunks, int | jax.Array]:
    """-> (the division of T positions into chunks of at most `most` positions, but at least 1 per device; the number of chunks
    that have to be computed). used: see `token_stats`."""
    parts = context_size(sharding)
    own = -(-T // parts)
    size = max(1, min(own, most // parts))
    if used is not None and parts == 1:
        size = min(size, -(-own // USED_CHUNKS))
    chunks = -(-own // size)
    return PositionChunks(sharding, T, parts, chunks, size), chunks if used is None or parts > 1 else -(-used // size)


class _Way(NamedTuple):
    """How to compute the statistics."""

    temperature: float
    cap: float | None
    split: PositionChunks
    transposed: bool


def token_stats(
    hidden, unembedding, targets, temperature: float = 1.0, chunk_floats: int = CHUNK_FLOATS, cap: float | None = None,
    *, sharding: Sharding, used=None, transposed: bool = False,
) -> TokenStats:
    """Statistics of softmax(logits / temperature) at `targets`, where the logits are `lm_logits` with `cap`.

    hidden [B, T, D] (any float dtype), unembedding [D, V], targets int [B, T]. The softmax is in float32. Chunks are slices
    of T; if `sharding` splits rows, each chunk takes a slice of every device's part, so no data moves. The backward pass
    recomputes each chunk's logits and rounds their gradient to the dtype of hidden before the matrix products. used int32 []:
    results at positions >= used are undefined, and chunks of such positions are skipped unless the mesh splits rows.
    transposed: sum the gradient of the unembedding as [V, D].
    """
    chex.assert_shape(hidden, (*targets.shape, unembedding.shape[0]))
    chex.assert_type(targets, int)
    B, T = targets.shape
    split, count = split_positions(T, chunk_floats // max(1, B * unembedding.shape[1]), sharding, used)
    way, weight = _Way(temperature, cap, split, transposed), unembedding.astype(hidden.dtype)
    return TokenStats(*_stats(way, hidden, weight, targets, count))


def weighted_nll(
    hidden, unembedding, targets, weights, chunk_floats: int = CHUNK_FLOATS, cap: float | None = None,
    *, sharding: Sharding, used=None, transposed: bool = False,
) -> jax.Array:
    """float32 []: the weighted sum of the targets' negative log-likelihoods, in nats; other arguments as in `token_stats`.
    weights float32 [B, T] are constants; a target of weight 0 may be any number.

    The forward pass computes the gradient up to the factor of the cotangent, so each chunk's logits are computed only once.
    """
    chex.assert_equal_shape([targets, weights])
    chex.assert_shape(hidden, (*targets.shape, unembedding.shape[0]))
    targets = jnp.where(weights == 0, 0, targets)
    if hidden.dtype == jnp.float16:  # Its gradients must be computed after loss scaling, or they underflow.
        options = {"sharding": sharding, "used": used, "transposed": transposed}
        stats = token_stats(hidden, unembedding, targets, 1.0, chunk_floats, cap, **options)
        return -jnp.sum(stats.logprobs * weights)
    B, T = targets.shape
    split, count = split_positions(T, chunk_floats // max(1, B * unembedding.shape[1]), sharding, used)
    weight, weights = unembedding.astype(hidden.dtype), jax.lax.stop_gradient(weights)
    return _nll(_Way(1.0, cap, split, transposed), hidden, weight, targets, weights, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(way: _Way, hidden, weight, targets, count):
    """(log-probs, entropies) [B, T] of the first `count` chunks."""
    return _stats_forward(way, hidden, weight, targets, count)[0]


def _stats_forward(way: _Way, hidden, weight, targets, count):
    chunks, wanted = way.split.cut(hidden), way.split.cut(targets)

    def one(i, results):
        raw = lm_logits(chunks[i], weight, way.cap) / way.temperature
        # Subtract the maximum first: a large common offset of the logits would cost precision in everything below.
        top = jnp.max(raw, axis=-1, keepdims=True)
        logits = raw - top
        logz = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
        chosen = jnp.take_along_axis(logits, wanted[i][..., None], axis=-1)[..., 0]
        entropy = logz - jnp.sum(jnp.exp(logits - logz[..., None]) * logits, axis=-1)
        new = chosen - logz, entropy, top[..., 0] + logz
        return tuple(x.at[i].set(y) for x, y in zip(results, new, strict=True))

    logprobs, entropy, logz = jax.lax.fori_loop(0, count, one, (jnp.zeros(wanted.shape),) * 3)
    return (way.split.join(logprobs), way.split.join(entropy)), (hidden, weight, targets, count, entropy, logz)


def _stats_backward(way: _Way, saved, cotangents):
    """With p = softmax(l) and H its entropy, d log p_y / d l_v = [v = y] - p_v and d H / d l_v = -p_v (log p_v + H)."""
    hidden, weight, targets, count, entropy, logz = saved
    chunks, wanted = way.split.cut(hidden), way.split.cut(targets)
    for_logprobs, for_entropy = (None if isinstance(x, SymbolicZero) else way.split.cut(x) for x in cotangents)
    dtype = hidden.dtype

    def one(i, gradients):
        hidden_gradient, weight_gradient = gradients
        logits = lm_logits(chunks[i], weight, way.cap) / way.temperature
        logp = logits - logz[i][..., None]
        p = jnp.exp(logp)
        gradient = jnp.zeros_like(p)
        if for_logprobs is not None:
            chosen = jax.lax.broadcasted_iota(jnp.int32, p.shape, 2) == wanted[i][..., None]
            gradient += for_logprobs[i][..., None] * (chosen.astype(p.dtype) - p)
        if for_entropy is not None:
            gradient -= for_entropy[i][..., None] * p * (logp + entropy[i][..., None])
        gradient /= way.temperature
        if way.cap is not None:  # d (cap tanh(x / cap)) = 1 - tanh^2
            gradient *= 1 - jnp.square(logits * way.temperature / way.cap)
        gradient = gradient.astype(dtype)
        to_hidden = jnp.einsum("bcv,dv->bcd", gradient, weight, preferred_element_type=jnp.float32)
        return hidden_gradient.at[i].set(to_hidden.astype(dtype)), _add(way, weight_gradient, chunks[i], gradient)

    start = jnp.zeros_like(chunks), _no_sum(way, len(targets), weight.shape)
    hidden_gradient, weight_gradient = jax.lax.fori_loop(0, count, one, start)
    return way.split.join(hidden_gradient), _sum(way, weight_gradient).astype(dtype), None, None


_stats.defvjp(
    lambda way, *inputs: _stats_forward(way, *(x.value for x in inputs)), _stats_backward, symbolic_zeros=True
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(way: _Way, hidden, weight, targets, weights, count):
    (logprobs, _), _ = _stats_forward(way, hidden, weight, targets, count)
    return -jnp.sum(logprobs * weights)


def _nll_forward(way: _Way, hidden, weight, targets, weights, count):
    chunks, wanted, weighed = (way.split.cut(x.value) for x in (hidden, targets, weights))
    dtype, weight, trained = hidden.value.dtype, weight.value, weight.perturbed

    def one(i, sums):
        loss, hidden_gradient, weight_gradient = sums
        raw = lm_logits(chunks[i], weight, way.cap) / way.temperature
        logits = raw - jnp.max(raw, axis=-1, keepdims=True)
        odds = jnp.exp(logits)
        total = jnp.sum(odds, axis=-1, keepdims=True)
        chosen = jax.lax.broadcasted_iota(jnp.int32, odds.shape, 2) == wanted[i][..., None]
        logprobs = jnp.take_along_axis(logits, wanted[i][..., None], axis=-1)[..., 0] - jnp.log(total[..., 0])
        gradient = weighed[i][..., None] * (odds / total - chosen.astype(odds.dtype))
        if way.cap is not None:
            gradient *= 1 - jnp.square(raw / way.cap)
        gradient = gradient.astype(dtype)
        to_hidden = jnp.einsum("bcv,dv->bcd", gradient, weight, preferred_element_type=jnp.float32)
        if trained:
            weight_gradient = _add(way, weight_gradient, chunks[i], gradient)
        return loss - jnp.sum(weighed[i] * logprobs), hidden_gradient.at[i].set(to_hidden.astype(dtype)), weight_gradient

    start = _no_sum(way, len(targets.value), weight.shape) if trained else None
    loss, of_hidden, of_weight = jax.lax.fori_loop(0, count.value, one, (jnp.float32(0), jnp.zeros_like(chunks), start))
    return loss, (way.split.join(of_hidden), _sum(way, of_weight).astype(dtype) if trained else None)


def _nll_backward(way: _Way, kept, g):
    if isinstance(g, SymbolicZero):
        return (None,) * 5
    return *(None if x is None else (x * g).astype(x.dtype) for x in kept), None, None, None


_nll.defvjp(_nll_forward, _nll_backward, symbolic_zeros=True)


def _no_sum(way: _Way, B: int, shape: tuple[int, int]) -> jax.Array:
    """Zeros to which `_add` adds the gradient of a weight of this shape [D, V]: float32 [D, V], or [V, D] if `transposed`. On a
    mesh the first axes are [P, parts]: one partial sum for each split of the rows and of their length, so nothing is
    communicated until `_sum` adds them up."""
    sharding, shape = way.split.sharding, shape[::-1] if way.transposed else shape
    if sharding.mesh.size == 1:
        return jnp.zeros(shape)
    ways = sharding.batch_size if B % sharding.batch_size == 0 else 1
    return _constrain(way, jnp.zeros((ways, way.split.parts, *shape)))


def _add(way: _Way, total: jax.Array, hidden_BxCxD, gradient_BxCxV) -> jax.Array:
    """Adds the gradient of a chunk of positions to a sum from `_no_sum`."""
    split, result = way.split, "vd" if way.transposed else "dv"
    if total.ndim == 2:
        return total + jnp.einsum(f"bcd,bcv->{result}", hidden_BxCxD, gradient_BxCxV, preferred_element_type=jnp.float32)
    apart = [x.reshape(len(total), -1, split.parts, split.size, x.shape[-1]) for x in (hidden_BxCxD, gradient_BxCxV)]
    added = jnp.einsum(f"pbqcd,pbqcv->pq{result}", *apart, preferred_element_type=jnp.float32)
    return _constrain(way, total + added)


def _sum(way: _Way, total: jax.Array) -> jax.Array:
    """The gradient [D, V]."""
    whole = total if total.ndim == 2 else _constrain(way, jnp.sum(total, axis=(0, 1)), "embed")
    return whole.T if way.transposed else whole


def _constrain(way: _Way, total: jax.Array, hidden: str | None = None) -> jax.Array:
    """Constrains the sharding of a gradient or of its partial sums. hidden: the logical axis of D."""
    weight = ("vocab", hidden) if way.transposed else (hidden, "vocab")
    return way.split.sharding.constrain(total, (*_APART[: total.ndim - 2], *weight))


def token_kl(
    hidden, unembedding, reference_hidden, reference_unembedding, temperature: float = 1.0,
    chunk_floats: int = CHUNK_FLOATS, cap: float | None = None, *, sharding: Sharding, used=None,
) -> jax.Array:
    """float32 [B, T], nats: the full-vocabulary KL(policy || reference) of softmax(logits / temperature).

    hidden and reference_hidden [B, T, D], unembeddings [D, V]; the logits are `lm_logits` with `cap`. Chunks and `used` as in
    `token_stats`. No gradient flows into the reference.
    """
    chex.assert_equal_shape([hidden, reference_hidden], dims=(0, 1))
    chex.assert_equal_shape([unembedding, reference_unembedding], dims=1)
    weight, reference_weight = unembedding.astype(hidden.dtype), reference_unembedding.astype(reference_hidden.dtype)
    reference_hidden, reference_weight = jax.lax.stop_gradient((reference_hidden, reference_weight))

    def one(hidden_BxCxD, reference_BxCxD):
        logits = lm_logits(hidden_BxCxD, weight, cap) / temperature
        return full_kl(logits, lm_logits(reference_BxCxD, reference_weight, cap) / temperature)

    # Both heads together stay within the limit on logits.
    size = chunk_floats // max(1, 2 * hidden.shape[0] * weight.shape[1])
    return _in_chunks(one, size, sharding, used, hidden, reference_hidden)


def greedy_tokens(
    hidden, unembedding, chunk_floats: int = CHUNK_FLOATS, cap: float | None = None, *, sharding: Sharding
) -> jax.Array:
    """int32 [B, T]: the most likely token at each position of hidden [B, T, D]; the first of several equal ones. Chunks as in
    `token_stats`, of the unembedding [D, V]."""
    weight = unembedding.astype(hidden.dtype)

    def one(hidden_BxCxD):
        return jnp.argmax(lm_logits(hidden_BxCxD, weight, cap), axis=-1).astype(jnp.int32)

    return _in_chunks(one, chunk_floats // max(1, hidden.shape[0] * weight.shape[1]), sharding, None, hidden)


def _in_chunks(fn: Callable, size: int, sharding: Sharding, used, *arrays):
    """Applies fn (arrays [B, T, ...] -> [B, T], float32 if `used` is given) to at most `size` positions at a time, but at least
    1 per device; the backward pass recomputes each chunk."""
    split, _ = split_positions(arrays[0].shape[1], size, sharding, used)
    one = jax.checkpoint(fn)
    if split.parts * split.chunks == 1:
        return one(*arrays)

    def step(i, x):
        if used is None or split.parts > 1:
            return i + 1, one(*x)
        return i + 1, jax.lax.cond(i * split.size < used, one, lambda *x: jnp.zeros(x[0].shape[:2]), *x)

    _, out = jax.lax.scan(step, jnp.int32(0), tuple(split.cut(x) for x in arrays))
    return split.join(out)


def response_positions(prompt_length: jax.Array, N: int) -> jax.Array:
    """int32 [B, N]: the positions of the response's tokens in a row (prompt, then response)."""
    return prompt_length[:, None] + jnp.arange(N, dtype=prompt_length.dtype)[None, :]


def gather_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [B, T] or [B, T, D] at positions [B, N]. Positions are clipped to the row; the caller masks by length."""
    chex.assert_rank(positions, 2)
    chex.assert_equal_shape([x, positions], dims=0)
    index = jnp.clip(positions, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index if x.ndim == 2 else index[..., None], axis=1)


def counted_first(counted, *arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Moves the positions where counted [B, T] is not 0 to the front of each row of `arrays` [B, T, ...]. -> (used, arrays);
    used int32 [], the largest number of counted positions in a row, is the `used` of `token_stats`."""
    counts = counted != 0
    order = jnp.argsort(~counts, axis=1, stable=True)
    return jnp.max(jnp.sum(counts, axis=1, dtype=jnp.int32)), tuple(_permuted(x, order) for x in arrays)


@jax.custom_vjp
def _permuted(x: jax.Array, order_BxT: jax.Array) -> jax.Array:
    return gather_positions(x, order_BxT)


# The gradient of a permutation is itself a gather, which is cheaper than the scatter for a general gather.
_permuted.defvjp(
    lambda x, order: (gather_positions(x, order), order),
    lambda order, g: (gather_positions(g, jnp.argsort(order, axis=1)), None),
)


def length_mask(length: jax.Array, N: int) -> jax.Array:
    """float32 [B, N]: 1 at the first `length` positions."""
    return (jnp.arange(N)[None, :] < length[:, None]).astype(jnp.float32)
