"""Ring attention: the mesh axis `context` splits rows, and keys and values travel round its devices step by step.

Device i of n holds chunks i and 2n-1-i of a row (`jaxalign.parallel.zigzag`). At step s it has the keys and values of device
j = i - s (mod n). Causality rules out two of the four products of their chunks. The later queries always see the earlier keys;
the other product is that of the two earlier chunks if j < i, and of the two later chunks if j > i. So every device computes two
products at each step, without branching, and three at step 0, two of them half masked: 2n+1 in total, instead of the 4n of
unmasked attention. Meanwhile the next keys and values are transferred.

The softmax is accumulated online in float32 (Milakov and Gimelshein, arXiv 1805.02867). The backward pass keeps q, k, v, the
output and the log-sum-exp of each softmax; it sends keys, values and their gradients round the ring once more.
Source: Ring Attention, arXiv 2310.01889; the gradients as in FlashAttention-2, arXiv 2307.08691, section 3.1.

Dimension letters: B batch, T time, c tokens of a chunk, H query heads, K key/value heads, G = H / K, h head dim; 2 stands for
the two chunks of a device. Inside `shard_map`, sizes are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.plain import NEGATIVE
from jaxalign.models.layers import softcap
from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.zigzag import CONTEXT, context_size

BLOCK = 1024  # The maximum number of keys whose scores exist at a time; longer chunks are processed in blocks of this size.


def length_multiple(size: int, T: int) -> int:
    """Rows of T tokens are padded to a multiple of this: chunks must be equal, and whole blocks if longer than one block."""
    chunk = -(-T // (2 * size))
    return 2 * size * (BLOCK if chunk > BLOCK else 1)


def ring_attention(config: DecoderConfig, sharding: Sharding, segment_ids: jax.Array | None) -> Callable:
    """`attend(q, k, v, local)` over rows and segment ids that `zigzag.deal` has distributed: see `dispatch`."""
    ring = Ring(sharding, context_size(sharding), config.scale, config.attention_softcap)

    def attend(q, k, v, local):
        window = config.windows(False) if local is None else jnp.where(local, config.windows(True), q.shape[1])
        return _attend(ring, q, k, v, segment_ids, None if window is None else jnp.int32(window))

    return attend


class Keys(NamedTuple):
    """The arrays that travel round the ring: k and v [2, B, c, K, h], segments [2, B, c] or None."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


class Sums(NamedTuple):
    """A partial softmax, float32: weighted values [2, B, c, K, G, h]; the largest score and the sum of the exponentials
    relative to it [2, B, c, K, G]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static settings of ring attention. size: the number of devices of the ring."""

    sharding: Sharding
    size: int
    scale: float
    cap: float | None

    def specs(self):
        """PartitionSpecs of (q, k, v, segments, window), and of arrays [B, T, K, G]."""
        spec = self.sharding.spec
        q, k = spec(("batch", "length", "heads", None)), spec(("batch", "length", "kv_heads", None))
        return (q, k, k, spec(("batch", "length")), spec(())), k

    def send(self, tree):
        """Sends arrays to the next device of the ring."""
        route = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, route), tree)

    def round(self, fn: Callable, carry, keys: Keys, after: Callable = lambda carry: carry):
        """Runs carry = after(fn(carry, keys, step)) for every step, with the keys on this device at that step. -> carry."""
        arriving = self.send(keys)
        carry = after(fn(carry, keys, 0))

        def body(state, step):
            carry, keys = state
            following = self.send(keys)
            return (after(fn(carry, keys, step)), following), None

        keys = arriving
        if self.size > 2:
            (carry, keys), _ = jax.lax.scan(body, (carry, keys), jnp.arange(1, self.size - 1))
        return after(fn(carry, keys, self.size - 1))


def _pick(x, index):
    return None if x is None else jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _halves(x):
    """[B, 2c, ...] as [2, B, c, ...]."""
    return None if x is None else jnp.stack(jnp.split(x, 2, axis=1))


class _Product(NamedTuple):
    """One chunk of queries [B, c, K, G, h] with one chunk of keys, processed in blocks of keys."""

    ring: Ring
    causal: bool
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    q_places: jax.Array
    k_places: jax.Array
    window: jax.Array | None

    def over_blocks(self, fn: Callable, carry):
        """Scans fn(carry, at, size) -> (carry, out) over the blocks of keys. -> (carry, outs joined to [B, c, ...])."""
        c = self.k.shape[1]
        size = min(c, BLOCK)
        if size == c:
            return fn(carry, 0, c)
        carry, outs = jax.lax.scan(lambda carry, at: fn(carry, at, size), carry, jnp.arange(0, c, size))
        return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], c, *x.shape[3:]), outs)

    def block(self, at, size: int):
        """(k, v, scores float32 [B, K, G, c, size], mask bool [B or 1, 1, 1, c, size], or None if every key is seen)."""
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=size)
        k, v = cut(self.k, axis=1), cut(self.v, axis=1)
        scores = jnp.einsum("btkgh,bskh->bkgts", self.q, k, preferred_element_type=jnp.float32)
        scores = softcap(scores * self.ring.scale, self.ring.cap)
        age = self.q_places[:, None] - cut(self.k_places, axis=0)[None, :]
        seen = [(age >= 0)[None]] if self.causal else []
        if self.window is not None:
            seen.append((age < self.window)[None])
        if self.q_segments is not None:
            seen.append(self.q_segments[:, :, None] == cut(self.k_segments, axis=1)[:, None, :])
        return k, v, scores, functools.reduce(jnp.logical_and, seen)[:, None, None] if seen else None


def _hide(values, seen, instead):
    return values if seen is None else jnp.where(seen, values, instead)


def _add(product: _Product, sums: Sums) -> Sums:
    """Adds the keys of one product to `sums` of a chunk [B, c, ...]. Scores are [B, K, G, c, size], sums [B, c, K, G]."""

    def block(sums, at, size):
        _, v, scores, seen = product.block(at, size)
        scores = _hide(scores, seen, NEGATIVE)
        top = jnp.maximum(sums.top, jnp.moveaxis(jnp.max(scores, axis=-1), 3, 1))
        weights = _hide(jnp.exp(scores - jnp.moveaxis(top, 1, 3)[..., None]), seen, 0.0)
        shrunk = jnp.exp(sums.top - top)
        new = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = sums.total * shrunk + jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)
        return Sums(sums.out * shrunk[..., None] + new, top, total), None

    return product.over_blocks(block, sums)[0]


def _gradients(product: _Product, d_out, lse, delta):
    """(dq, dk, dv) of one product, float32. d_out [B, c, K, G, h]; lse and delta [B, c, K, G]."""
    q, ring = product.q, product.ring
    lse, delta = (jnp.moveaxis(x, 1, 3)[..., None] for x in (lse, delta))  # [B, K, G, c, 1]

    def block(dq, at, size):
        k, v, scores, seen = product.block(at, size)
        weights = _hide(jnp.exp(scores - lse), seen, 0.0)
        d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, v, preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights - delta)
        if ring.cap is not None:
            d_scores = d_scores * (1 - jnp.square(scores / ring.cap))
        d_scores = (d_scores * ring.scale).astype(q.dtype)
        dv = jnp.einsum("bkgts,btkgh->bskh", weights.astype(v.dtype), d_out, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgts,btkgh->bskh", d_scores, q, preferred_element_type=jnp.float32)
        return dq + jnp.einsum("bkgts,bskh->btkgh", d_scores, k, preferred_element_type=jnp.float32), (dk, dv)

    dq, (dk, dv) = product.over_blocks(block, jnp.zeros(q.shape, jnp.float32))
    return dq, dk, dv


class _Device(NamedTuple):
    """A device's inputs, split into its two chunks: its index in the ring, its queries [2, B, c, K, G, h] and its keys."""

    ring: Ring
    here: jax.Array
    q: jax.Array
    own: Keys
    window: jax.Array | None

    @classmethod
    def of(cls, ring: Ring, q, k, v, segments, window) -> _Device:
        # Tie the inputs of the masks to the queries. Otherwise XLA would compute the masks of all steps once and keep them.
        here = jax.lax.axis_index(CONTEXT)
        q, segments, window, here = jax.lax.optimization_barrier((q, segments, window, here))
        q, k, v, segments = (_halves(x) for x in (q, k, v, segments))
        return cls(ring, here, q.reshape(*q.shape[:3], k.shape[3], -1, q.shape[-1]), Keys(k, v, segments), window)

    def products(self, keys: Keys, step):
        """Yields (chunk of the queries, chunk of the keys, _Product) for each product of a step, with chunks 0 or 1."""
        c, there, last = self.q.shape[2], (self.here - step) % self.ring.size, 2 * self.ring.size - 1
        if isinstance(step, int) and step == 0:
            chunks = ((0, 0, True), (1, 0, False), (1, 1, True))  # The last entry: whether it needs a causal mask.
        else:
            both = jnp.where(step <= self.here, 0, 1)  # j = i - step >= 0: those keys are earlier.
            chunks = ((1, 0, False), (both, both, False))
        for qi, ki, causal in chunks:
            q_places = jnp.where(qi == 0, self.here, last - self.here) * c + jnp.arange(c)  # int32 [c], in the row.
            k_places = jnp.where(ki == 0, there, last - there) * c + jnp.arange(c)
            yield qi, ki, _Product(
                self.ring, causal, _pick(self.q, qi), _pick(keys.k, ki), _pick(keys.v, ki), _pick(self.own.segments, qi),
                _pick(keys.segments, ki), q_places, k_places, self.window,
            )


def _forward(ring: Ring, q, k, v, segments, window):
    """The output [B, T, H, h] in the dtype of v, on the mesh, and the residuals of the backward pass: the arguments, the
    output, and the log-sum-exp float32 [B, T, K, G]."""

    def local(q, k, v, segments, window):
        device = _Device.of(ring, q, k, v, segments, window)

        def step(sums, keys, number):
            for qi, _, product in device.products(keys, number):
                part = _add(product, jax.tree.map(lambda x: _pick(x, qi), sums))  # noqa: B023
                put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=qi, axis=0)
                sums = jax.tree.map(put, sums, part)
            return sums

        zero = jnp.zeros(device.q.shape, jnp.float32)
        sums = ring.round(step, Sums(zero, zero[..., 0] + NEGATIVE, zero[..., 0]), device.own)
        halves = (sums.out / sums.total[..., None]).astype(v.dtype), sums.top + jnp.log(sums.total)
        out, lse = (jnp.concatenate([x[0], x[1]], axis=1) for x in halves)
        return out.reshape(q.shape), lse

    specs, spec = ring.specs()
    out, lse = on_each_device(ring.sharding, local, specs, (specs[0], spec))(q, k, v, segments, window)
    return out, (q, k, v, segments, window, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q, k, v, segments, window) -> jax.Array:
    return _forward(ring, q, k, v, segments, window)[0]


def _attend_backward(ring: Ring, kept, d_out):
    def local(q, k, v, segments, window, out, lse, d_out):
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        device = _Device.of(ring, q, k, v, segments, window)
        d_out, lse = _halves(d_out).reshape(device.q.shape), _halves(lse)
        delta = _halves(delta).reshape(lse.shape)

        def step(carry, keys, number):
            dq, (dk, dv) = carry
            for qi, ki, product in device.products(keys, number):
                parts = _gradients(product, *(_pick(x, qi) for x in (d_out, lse, delta)))
                summed = zip((dq, dk, dv), (qi, ki, ki), parts, strict=True)
                dq, dk, dv = (
                    jax.lax.dynamic_update_index_in_dim(x, _pick(x, i) + part, i, 0) for x, i, part in summed
                )
            return dq, (dk, dv)

        start = jnp.zeros(device.q.shape, jnp.float32), (jnp.zeros(device.own.k.shape, jnp.float32),) * 2
        # The keys' gradients travel with the keys, and one step further, back to the device that owns the keys.
        dq, (dk, dv) = ring.round(step, start, device.own, lambda carry: (carry[0], ring.send(carry[1])))
        dq, dk, dv = (jnp.concatenate([x[0], x[1]], axis=1) for x in (dq, dk, dv))
        return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    specs, lse = ring.specs()
    split = on_each_device(ring.sharding, local, (*specs, specs[0], lse, specs[0]), specs[:3])
    return *split(*kept, d_out), None, None


_attend.defvjp(_forward, _attend_backward)
