"""Attention of texts that continue cached prefixes. The texts of a prefix read the same keys and values, which are not copied.

Dimension letters: G prefixes, R texts of a prefix, P slots of a prefix, B texts (G * R), T tokens of a text, C queries of a
block, Q queries of a block that share keys (those of C tokens, one query head after another), H query heads, K key/value heads,
h head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.blocked import BLOCK, MOST_BLOCKS
from jaxalign.models.attention.plain import NEGATIVE, windowed
from jaxalign.models.cache import Cache
from jaxalign.models.layers import softcap


def continued_attention(config: DecoderConfig, count_G: jax.Array) -> Callable:
    """`attend(q, k, v, local, past)`: attention of texts to themselves, causal, and to their prefixes.

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
