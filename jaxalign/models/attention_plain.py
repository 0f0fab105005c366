"""Attention as the formula says, over dense masks: what every other implementation must equal.

Dimension letters: B batch, T time, S keys, H query heads, K key/value heads, h head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.layers import softcap

LEAST_BLOCK = 64  # Queries of a block: fewer make products slow.
MOST_BLOCKS = 8  # What is compiled grows with them.
NEGATIVE = -1e30  # Finite, so that a row without any visible key gives numbers and not NaN.


def causal_mask(shape: tuple[int, int], segment_ids: jax.Array | None) -> jax.Array:
    """bool [B, T, T] (or [1, T, T] without segments): query t sees key s <= t of its own segment."""
    T = shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def windowed(config: DecoderConfig, local, mask: jax.Array, age: Callable[[], jax.Array]) -> jax.Array:
    """`mask` less the keys that are out of a layer's window. age() is by how much a query is later than a key; local says
    whether the layer is a local one, None where all are alike."""
    window = config.windows(True)
    if window is None or (local is None and config.windows(False) is None):
        return mask
    near = mask & (age() < window)
    return near if local is None else jnp.where(local, near, mask)


def plain_attention(
    config: DecoderConfig, shape: tuple[int, int], segment_ids: jax.Array | None, whole: bool = False, split: bool = False
) -> Callable:
    """`attend(q, k, v, local)` over rows of this shape [B, T]: see `jaxalign.models.attention`.

    Queries go block by block, each over the keys up to its end alone: of the square of scores what stands right of the diagonal
    is left out. Where no document of a block began before the block before it, older keys are left out too. A block's scores
    are computed again in the backward pass. whole: all at once, as where the mesh splits a row. split: the mesh splits the
    rows, so that no device knows alone whether older keys are needed, and they are never left out.
    """
    T = shape[1]
    mask_BxTxT, place = causal_mask(shape, segment_ids), jnp.arange(T)
    blocks = 1 if whole else max(1, min(MOST_BLOCKS, T // LEAST_BLOCK))
    ends = [T * (i + 1) // blocks for i in range(blocks)]
    starts = [0, *ends[:-1]]

    def reaches_back(start: int, low: int) -> jax.Array:
        """Whether a document has tokens before `low` and at `start`; its tokens stand side by side."""
        here = segment_ids[:, start]
        return jnp.any((segment_ids[:, low - 1] == here) & (here > 0))

    packed = segment_ids is not None and not split
    far = [packed and i > 1 and reaches_back(starts[i], starts[i - 1]) for i in range(blocks)]

    def attend_layer(q, k, v, local):
        mask = windowed(config, local, mask_BxTxT, lambda: (place[:, None] - place[None, :])[None])

        def over(low: int, start: int, end: int) -> Callable:
            @functools.partial(jax.checkpoint, prevent_cse=False)
            def block(q, k, v, mask):
                rows, keys = slice(start, end), slice(low, end)
                seen = mask[:, rows, keys]
                return attend(q[:, rows], k[:, keys], v[:, keys], seen, config.scale, config.attention_softcap)

            return block

        def block(i: int):
            whole = over(0, starts[i], ends[i])
            if far[i] is False:
                return whole(q, k, v, mask)
            return jax.lax.cond(far[i], whole, over(starts[i - 1], starts[i], ends[i]), q, k, v, mask)

        if blocks == 1:
            return attend(q, k, v, mask, config.scale, config.attention_softcap)
        return jnp.concatenate([block(i) for i in range(blocks)], axis=1)

    return attend_layer


def attend(q_BxTxHxh, k_BxSxKxh, v_BxSxKxh, mask_BxTxS, scale: float | None = None, cap: float | None = None) -> jax.Array:
    """Grouped-query attention, softmax in float32. mask is True where query t may see key s. Returns [B, T, H, h].

    scale is h ** -0.5 unless given; cap bounds the scores softly.
    """
    B, T, H, h = q_BxTxHxh.shape
    K = k_BxSxKxh.shape[2]
    q = q_BxTxHxh.reshape(B, T, K, H // K, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_BxSxKxh, preferred_element_type=jnp.float32)
    scores = softcap(scores * (h**-0.5 if scale is None else scale), cap)
    scores = jnp.where(mask_BxTxS[:, None, None, :, :], scores, NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxSxKxh.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BxSxKxh).reshape(B, T, H, h)
