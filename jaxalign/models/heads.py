"""Log-probabilities, entropies and divergences of LM heads, in chunks: [B, T, V] is never formed (Decision 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.kl import full_kl
from jaxalign.models.layers import Constrain, softcap
from jaxalign.parallel.zigzag import context_size

CHUNK_FLOATS = 1 << 22  # At most this many logits exist at once on a device (16 MB in float32), if a row's share allows it.
_NO_MESH = Constrain()


class TokenStats(NamedTuple):
    """float32 [B, T] each: the log-probability of the target token, and the entropy of the whole distribution, in nats."""

    logprobs: jax.Array
    entropy: jax.Array


def lm_logits(hidden, unembedding, cap: float | None = None) -> jax.Array:
    """float32 [..., V]: hidden [..., D] times unembedding [D, V] of the same dtype, bounded softly where there is a cap."""
    return softcap(jnp.einsum("...d,dv->...v", hidden, unembedding, preferred_element_type=jnp.float32), cap)


def token_stats(
    hidden, unembedding, targets, temperature: float = 1.0, chunk_floats: int = CHUNK_FLOATS, cap: float | None = None,
    constrain: Constrain = _NO_MESH,
) -> TokenStats:  # fmt: skip
    """Statistics of softmax(logits / temperature) at `targets`, the logits being `lm_logits` with `cap`.

    hidden [B, T, D] (any float dtype), unembedding [D, V], targets int [B, T]. The softmax is in float32. Chunks run over
    T, of each device's own part of it where `constrain` splits rows, so what lies on a mesh stays where it is; each is
    recomputed in the backward pass.
    """
    weight = unembedding.astype(hidden.dtype)

    def one(hidden_BxCxD, targets_BxC):
        logits = lm_logits(hidden_BxCxD, weight, cap) / temperature
        # The maximum goes off first, or the logits' common level takes up the digits of all that follows.
        logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        logz = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
        chosen = jnp.take_along_axis(logits, targets_BxC[..., None], axis=-1)[..., 0]
        entropy = logz - jnp.sum(jnp.exp(logits - logz[..., None]) * logits, axis=-1)
        return chosen - logz, entropy

    size = chunk_floats // max(1, hidden.shape[0] * weight.shape[1])
    return TokenStats(*_in_chunks(one, size, constrain, hidden, targets))


def token_kl(
    hidden, unembedding, reference_hidden, reference_unembedding, temperature: float = 1.0,
    chunk_floats: int = CHUNK_FLOATS, cap: float | None = None, constrain: Constrain = _NO_MESH,
) -> jax.Array:  # fmt: skip
    """float32 [B, T], nats: KL(policy || reference), both softmax(logits / temperature), summed over the vocabulary.

    hidden and reference_hidden [B, T, D], unembeddings [D, V]; the logits are `lm_logits` with `cap`. Chunked as in
    `token_stats`. No gradient flows into the reference.
    """
    weight, reference_weight = unembedding.astype(hidden.dtype), reference_unembedding.astype(reference_hidden.dtype)
    reference_hidden, reference_weight = jax.lax.stop_gradient((reference_hidden, reference_weight))

    def one(hidden_BxCxD, reference_BxCxD):
        logits = lm_logits(hidden_BxCxD, weight, cap) / temperature
        return full_kl(logits, lm_logits(reference_BxCxD, reference_weight, cap) / temperature)

    # Of two heads' logits each has half the room.
    size = chunk_floats // max(1, 2 * hidden.shape[0] * weight.shape[1])
    return _in_chunks(one, size, constrain, hidden, reference_hidden)


def _in_chunks(fn: Callable, size: int, constrain: Constrain, *arrays):
    """fn of arrays [B, T, ...], whose results are [B, T], over at most `size` positions at a time, at least 1 a device; each
    chunk is recomputed in the backward pass."""
    B, T = arrays[0].shape[:2]
    parts = context_size(constrain.sharding)
    own = -(-T // parts)
    size = max(1, min(own, size // parts))
    chunks, one = -(-own // size), jax.checkpoint(fn)
    if parts * chunks == 1:
        return one(*arrays)

    def place(x, axes):
        return constrain(x, axes + (None,) * (x.ndim - len(axes))) if parts > 1 else x

    def cut(x):
        padded = jnp.pad(x, ((0, 0), (0, parts * chunks * size - T)) + ((0, 0),) * (x.ndim - 2))
        padded = place(padded, ("batch", "length")).reshape(B, parts, chunks, size, *x.shape[2:])
        return place(jnp.moveaxis(padded, 2, 0).reshape(chunks, B, parts * size, *x.shape[2:]), (None, "batch", "length"))

    def join(x):
        x = jnp.moveaxis(x.reshape(chunks, B, parts, size), 0, 2)
        return place(x, ("batch", "length")).reshape(B, parts * chunks * size)[:, :T]

    _, out = jax.lax.scan(lambda _, x: (None, one(*x)), None, tuple(cut(x) for x in arrays))
    return jax.tree.map(join, out)


def response_positions(prompt_length: jax.Array, N: int) -> jax.Array:
    """int32 [B, N]: where in a row (prompt, then response) the response's tokens stand."""
    return prompt_length[:, None] + jnp.arange(N, dtype=prompt_length.dtype)[None, :]


def gather_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [B, T] or [B, T, D] at positions [B, N], clipped into the row: the caller masks by length."""
    index = jnp.clip(positions, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index if x.ndim == 2 else index[..., None], axis=1)


def length_mask(length: jax.Array, N: int) -> jax.Array:
    """float32 [B, N]: 1 for the first `length` places."""
    return (jnp.arange(N)[None, :] < length[:, None]).astype(jnp.float32)
