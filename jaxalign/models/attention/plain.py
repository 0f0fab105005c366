"""Reference implementation of attention with dense masks. All other implementations must match it.

Dimension letters: B batch, T time, S keys, H query heads, K key/value heads, h head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.layers import softcap

NEGATIVE = -1e30  # Finite, so that a query without visible keys gives finite numbers, not NaN.
STEM = 1 << 20
"""Segment ids below this are documents. Document d may split into branches d + n * STEM, n = 1, 2, ... Each branch continues
the tokens of segment d (the stem) and does not see the other branches (prefix sharing, arXiv 2410.20305)."""


def same_text(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """bool: whether a key belongs to the query's text: its segment is the query's own segment, or the stem of it."""
    return (queries == keys) | (queries % STEM == keys)


def windowed(config: DecoderConfig, local, mask: jax.Array, age: Callable[[], jax.Array]) -> jax.Array:
    """`mask` without the keys outside a layer's window. age() is the position of a query minus that of a key; local is whether
    the layer is local, None if all layers are alike."""
    window = config.windows(True)
    if window is None or (local is None and config.windows(False) is None):
        return mask
    near = mask & (age() < window)
    return near if local is None else jnp.where(local, near, mask)


def plain_attention(config: DecoderConfig, shape: tuple[int, int], segment_ids: jax.Array | None) -> Callable:
    """`attend(q, k, v, local)` over rows of this shape [B, T], in one block: see `dispatch`."""
    place, mask_BxTxT = jnp.arange(shape[1]), jnp.tril(jnp.ones((shape[1], shape[1]), bool))[None]
    if segment_ids is not None:  # Query t sees key s <= t of its own segment, or of its stem.
        mask_BxTxT = mask_BxTxT & same_text(segment_ids[:, :, None], segment_ids[:, None, :])

    def attend_layer(q, k, v, local):
        mask = windowed(config, local, mask_BxTxT, lambda: (place[:, None] - place[None, :])[None])
        return attend(q, k, v, mask, config.scale, config.attention_softcap)

    return attend_layer


def attend(q_BxTxHxh, k_BxSxKxh, v_BxSxKxh, mask_BxTxS, scale: float | None = None, cap: float | None = None) -> jax.Array:
    """Grouped-query attention, softmax in float32. mask is True where query t may see key s. Returns [B, T, H, h].

    scale defaults to h ** -0.5; cap is a soft cap on the scores.
    """
    B, T, H, h = q_BxTxHxh.shape
    K = k_BxSxKxh.shape[2]
    q = q_BxTxHxh.reshape(B, T, K, H // K, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_BxSxKxh, preferred_element_type=jnp.float32)
    scores = softcap(scores * (h**-0.5 if scale is None else scale), cap)
    scores = jnp.where(mask_BxTxS[:, None, None, :, :], scores, NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxSxKxh.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BxSxKxh).reshape(B, T, H, h)
