"""Plain attention in blocks of queries; used where there is no fused kernel. `blocked_attention` has a custom backward pass.

Skips keys after a block's last query and, if all documents are short, keys far before its first. The backward pass keeps q, k,
v, the output and the log-sum-exp of each softmax, and recomputes the scores (FlashAttention-2, arXiv 2307.08691).

Dimension letters: B batch, T time, N blocks, C tokens of a block, M queries of a block (those of the query heads that share
keys, one head after another), S keys that a block sees, H query heads, K key/value heads, h head dim. In `continued_attention`
also G prefixes, R texts of a prefix, P slots of a prefix, Q queries of a block that share keys; B is G * R.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.plain import NEGATIVE, STEM, same_text, windowed
from jaxalign.models.cache import Cache
from jaxalign.models.layers import keep, softcap

BLOCK = 64  # Queries of a block; smaller blocks make the matrix products slow.
MOST_BLOCKS = 8  # Limit on blocks that see all earlier keys: each adds to the compiled program.


class BlockRows(NamedTuple):
    """Metadata of the rows for a layer. segment_ids int32 [B, T], None if each row is one document; way int32 []: the index of
    the band in `Blocked.bands` to use, len(bands) for `spans`, None if there are no bands; local bool []: whether the layer
    has the window, None if all layers are alike."""

    segment_ids: jax.Array | None
    way: jax.Array | None
    local: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Blocked:
    """How rows of T tokens are split into blocks. bands: alternative numbers of earlier blocks that each block of `BLOCK`
    queries sees, narrowest first. spans: the split without a band, (start, end) of blocks that see all earlier keys."""

    T: int
    bands: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    window: int | None
    scale: float
    cap: float | None


def blocked_attention(
    config: DecoderConfig, shape: tuple[int, int], segment_ids: jax.Array | None, split: bool = False
) -> Callable:
    """`attend(q, k, v, local)` over rows of this shape [B, T]: see `jaxalign.models.attention.dispatch`.

    split: the mesh splits the rows, so no single device knows how long the documents are; then no band is used.
    """
    T = shape[1]
    bands = bands_of(T) if segment_ids is not None and not split else ()
    blocks = max(1, min(MOST_BLOCKS, T // BLOCK))
    ends = [T * (i + 1) // blocks for i in range(blocks)]
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    how = Blocked(T, bands, spans, config.windows(config.mixed_layers), config.scale, config.attention_softcap)
    way = way_of(segment_ids, bands) if bands else None
    return lambda q, k, v, local: _attend(how, q, k, v, BlockRows(segment_ids, way, local))


def bands_of(T: int) -> tuple[int, ...]:
    """The bands that reduce the work for rows of T tokens: 1, the widest one that computes at most 70% of the scores computed
    without a band, and the square root of that. Empty if no band does."""
    blocks = max(1, min(MOST_BLOCKS, T // BLOCK))
    widest = int(0.7 * T * (blocks + 1) / (2 * blocks)) // BLOCK - 1
    return tuple(sorted({1, math.isqrt(widest - 1) + 1, widest})) if widest > 0 else ()


def way_of(segment_ids: jax.Array, bands: Sequence[int]) -> jax.Array:
    """int32 []: the index of the narrowest band that covers every document; len(bands) if none does.

    The tokens of a document, including its branches, must be contiguous; segment 0 is padding.
    """
    documents, T = segment_ids % STEM, segment_ids.shape[1]
    way = 0
    for band in bands:  # Add one for each band that is too narrow: a document begins before it.
        starts = jnp.arange((band + 1) * BLOCK, T, BLOCK)
        here = documents[:, starts]
        way = way + jnp.any((documents[:, starts - (band * BLOCK + 1)] == here) & (here > 0)).astype(jnp.int32)
    return way


class _Cut(NamedTuple):
    """Queries [start, end) of the rows in N blocks of C. The first block sees keys [low, high); each following block sees a
    range of the same size, C later. Keys before the start of a row and queries after its end are padding."""

    start: int
    end: int
    low: int
    high: int
    C: int
    N: int

    def queries(self, x_BxTxHxd: jax.Array, K: int) -> jax.Array:
        """[B, K, N, M, d]"""
        B, _, H, d = x_BxTxHxd.shape
        spare = self.N * self.C - (self.end - self.start)
        x = jnp.pad(x_BxTxHxd[:, self.start : self.end], ((0, 0), (0, spare), (0, 0), (0, 0)))
        x = x.reshape(B, self.N, self.C, K, H // K, d).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(B, K, self.N, -1, d)

    def rows(self, x_BxKxNxMxd: jax.Array) -> jax.Array:
        """The inverse of `queries`: [B, end - start, H, d]."""
        B, K, N, _, d = x_BxKxNxMxd.shape
        x = x_BxKxNxMxd.reshape(B, K, N, -1, self.C, d).transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(B, N * self.C, -1, d)[:, : self.end - self.start]

    def keys(self, x_BxKxTxd: jax.Array) -> jax.Array:
        """[B, K, N, S, d]"""
        if self.N == 1:
            return x_BxKxTxd[:, :, None, self.low : self.high]
        B, K, T, d = x_BxKxTxd.shape
        x = jnp.pad(x_BxKxTxd, ((0, 0), (0, 0), (-self.low, self.N * self.C - T), (0, 0))).reshape(B, K, -1, self.C, d)
        return jnp.concatenate([x[:, :, part : part + self.N] for part in range((self.high - self.low) // self.C)], axis=3)

    def gathered(self, x_BxKxNxSxd: jax.Array, T: int) -> jax.Array:
        """[B, T, K, d]: the transpose of `keys`, which sums over the copies of each key."""
        B, K, N, _, d = x_BxKxNxSxd.shape
        if self.N == 1:
            return jnp.pad(x_BxKxNxSxd[:, :, 0], ((0, 0), (0, 0), (self.low, T - self.high), (0, 0))).swapaxes(1, 2)
        x = x_BxKxNxSxd.reshape(B, K, N, -1, self.C, d)
        total = x[:, :, :, -1]
        for back in range(1, x.shape[3]):  # These keys are `back` blocks before the block that saw them.
            total = total + jnp.pad(x[:, :, back:, -1 - back], ((0, 0), (0, 0), (0, back), (0, 0), (0, 0)))
        return total.reshape(B, K, N * self.C, d)[:, :, :T].swapaxes(1, 2)

    def seen(self, how: Blocked, rows: BlockRows) -> jax.Array:
        """bool [B or 1, N, C, S]: which keys each query may see."""
        first = jnp.arange(self.N)[:, None] * self.C
        query, key = (first + jnp.arange(*ends)[None] for ends in ((self.start, self.start + self.C), (self.low, self.high)))
        age = query[:, :, None] - key[:, None, :]
        seen = ((age >= 0) & (key >= 0)[:, None, :])[None]
        if how.window is not None:
            near = seen & (age < how.window)[None]
            seen = near if rows.local is None else jnp.where(rows.local, near, seen)
        if rows.segment_ids is None:
            return seen
        ids = rows.segment_ids[:, None, :, None]
        own = self.queries(ids.swapaxes(1, 2), 1)[:, 0]
        return seen & same_text(own, self.keys(ids)[:, 0, :, None, :, 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Blocked, q, k, v, rows: BlockRows):
    return _choose(how, _forward, rows, q, k, v)[0]


def _choose(how: Blocked, compute: Callable, rows: BlockRows, *arrays):
    """`compute` with the split into blocks that `rows.way` selects."""
    splits = [[_Cut(0, how.T, -band * BLOCK, BLOCK, BLOCK, -(-how.T // BLOCK))] for band in how.bands]
    splits.append([_Cut(start, end, 0, end, end - start, 1) for start, end in how.spans])
    ways = [functools.partial(compute, how, cuts) for cuts in splits]
    return ways[0](rows, *arrays) if rows.way is None else jax.lax.switch(rows.way, ways, rows, *arrays)


def _scores(how: Blocked, cut: _Cut, rows: BlockRows, q, k):
    """Scores, float32 [B, K, N, M, S], and the derivative of the soft cap, or None without a cap."""
    s = jnp.einsum("bknmh,bknsh->bknms", q, k, preferred_element_type=jnp.float32) * how.scale
    slope = None
    if how.cap is not None:
        bent = jnp.tanh(s / how.cap)
        s, slope = how.cap * bent, 1 - jnp.square(bent)
    B, K, N, M, S = s.shape
    seen = cut.seen(how, rows)[:, None, :, None]
    seen = jnp.broadcast_to(seen, (len(seen), 1, N, M // cut.C, cut.C, S)).reshape(len(seen), 1, N, M, S)
    return jnp.where(seen, s, NEGATIVE), slope


def _forward(how: Blocked, cuts: list[_Cut], rows: BlockRows, q, k, v):
    """The output [B, T, H, h] and the log-sum-exp of each softmax, float32 [B, T, H, 1]."""
    K, (k, v) = k.shape[2], (x.swapaxes(1, 2) for x in (k, v))
    outputs = []
    for cut in cuts:
        s, _ = _scores(how, cut, rows, cut.queries(q, K), cut.keys(k))
        most = jnp.max(s, axis=-1, keepdims=True)
        p = jnp.exp(s - most)
        total = jnp.sum(p, axis=-1, keepdims=True)
        out = jnp.einsum("bknms,bknsh->bknmh", p.astype(v.dtype), cut.keys(v), preferred_element_type=jnp.float32) / total
        outputs.append((cut.rows(out.astype(v.dtype)), cut.rows(most + jnp.log(total))))
    return tuple(jnp.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True))


def _kept(how: Blocked, q, k, v, rows: BlockRows):
    out, log_total = (keep(x) for x in _choose(how, _forward, rows, q, k, v))
    return out, (q, k, v, rows, out, log_total)


def _gradients(how: Blocked, kept, g):
    q, k, v, rows, out, log_total = kept
    along = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1, keepdims=True)
    return *_choose(how, _backward, rows, q, k, v, log_total, along, g), None


def _backward(how: Blocked, cuts: list[_Cut], rows: BlockRows, q, k, v, log_total, along, g):
    """Gradients of q, k and v. along float32 [B, T, H, 1]: the dot product of each output with its cotangent g."""
    T, K, (k, v) = q.shape[1], k.shape[2], (x.swapaxes(1, 2) for x in (k, v))
    of_q, of_k, of_v = [], 0, 0
    for cut in cuts:
        queries, up, keys = cut.queries(q, K), cut.queries(g, K), cut.keys(k)
        s, slope = _scores(how, cut, rows, queries, keys)
        p = jnp.exp(s - cut.queries(log_total, K))
        of_s = jnp.einsum("bknmh,bknsh->bknms", up, cut.keys(v), preferred_element_type=jnp.float32)
        of_s = p * (of_s - cut.queries(along, K)) * how.scale
        of_s = (of_s if slope is None else of_s * slope).astype(q.dtype)
        of_q.append(cut.rows(jnp.einsum("bknms,bknsh->bknmh", of_s, keys)))
        of_k = of_k + cut.gathered(jnp.einsum("bknms,bknmh->bknsh", of_s, queries), T)
        of_v = of_v + cut.gathered(jnp.einsum("bknms,bknmh->bknsh", p.astype(g.dtype), up), T)
    return jnp.concatenate(of_q, axis=1), of_k, of_v


_attend.defvjp(_kept, _gradients)


def continued_attention(config: DecoderConfig, count_G: jax.Array) -> Callable:
    """`attend(q, k, v, local, past)`: attention of texts to themselves, causal, and to their cached prefixes.

    The texts of a prefix read the same keys and values, which are not copied.

    Args:
      config: the architecture.
      count_G: int32 [G], the number of tokens of each prefix. Later slots are not read.

    Returns:
      A function of q [B, T, H, h], k and v [B, T, K, h], `local` as in `attention.dispatch`, and a `Cache` of the G prefixes in
      the compute dtype, without its first axis. Texts [R * g, R * (g + 1)) continue prefix g. It returns [B, T, H, h].
    """

    def attend(q, k, v, local, past: Cache):
        T = q.shape[1]
        blocks = max(1, min(MOST_BLOCKS, T // BLOCK))
        ends = [T * (i + 1) // blocks for i in range(blocks)]
        parts = [
            _block(config, count_G, q[:, start:end], k[:, :end], v[:, :end], local, past)
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)

    return attend


def _block(config: DecoderConfig, count_G, q_BxCxHxh, k_BxSxKxh, v_BxSxKxh, local, past: Cache) -> jax.Array:
    """The last C queries of the first S tokens of each text. -> [B, C, H, h]."""
    (B, C, H, h), (S, K), (G, P) = q_BxCxHxh.shape, k_BxSxKxh.shape[1:3], (len(count_G), past.values.shape[2])
    q = q_BxCxHxh.reshape(G, B // G, C, K, H // K, h).transpose(0, 3, 1, 4, 2, 5).reshape(G, K, B // G, -1, h)
    k, v = (x.reshape(G, B // G, S, K, h) for x in (k_BxSxKxh, v_BxSxKxh))
    query = jnp.arange(S - C, S)
    own_age_1xCxS = (query[:, None] - jnp.arange(S)[None])[None]
    age_GxCxP = (count_G[:, None] + query[None])[:, :, None] - jnp.arange(P)[None, None]
    filled_GxCxP = jnp.broadcast_to((jnp.arange(P)[None] < count_G[:, None])[:, None], age_GxCxP.shape)

    def hide(scores_GxKxRxQxS, seen_GxCxS, age_GxCxS):
        seen = windowed(config, local, seen_GxCxS, lambda: age_GxCxS)[:, None, None, None]
        scores = softcap(scores_GxKxRxQxS * config.scale, config.attention_softcap)
        scores = scores.reshape(*scores.shape[:3], H // K, C, scores.shape[-1])
        return jnp.where(seen, scores, NEGATIVE).reshape(scores_GxKxRxQxS.shape)

    before = jnp.einsum("gkrqh,gkhp->gkrqp", q, past.keys, preferred_element_type=jnp.float32)
    before = hide(before, filled_GxCxP, age_GxCxP)
    own = jnp.einsum("gkrqh,grskh->gkrqs", q, k, preferred_element_type=jnp.float32)
    own = hide(own, own_age_1xCxS >= 0, own_age_1xCxS)
    most = jnp.maximum(jnp.max(before, axis=-1, keepdims=True), jnp.max(own, axis=-1, keepdims=True))
    before, own = jnp.exp(before - most), jnp.exp(own - most)
    total = jnp.sum(before, axis=-1, keepdims=True) + jnp.sum(own, axis=-1, keepdims=True)
    out = jnp.einsum("gkrqp,gkph->gkrqh", before.astype(v.dtype), past.values, preferred_element_type=jnp.float32)
    out = out + jnp.einsum("gkrqs,grskh->gkrqh", own.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(v.dtype).reshape(G, K, B // G, H // K, C, h)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, C, H, h)
