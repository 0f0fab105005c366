"""The one door to attention over whole rows: the decoder's layers call what `attention` gives and never see a mask.

A query sees the keys of its own segment that stand before it in the row or where it stands itself, and of those, in a layer
with a window, the nearest `window`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention_plain import plain_attention

# attend(q [B, T, H, h], k [B, T, K, h], v [B, T, K, h], local) -> [B, T, H, h] in the dtype of v. local: bool [], whether the
# layer has the window; None where all layers are alike.
Attend = Callable[[jax.Array, jax.Array, jax.Array, "jax.Array | None"], jax.Array]


def attention(config: DecoderConfig, shape: tuple[int, int], segment_ids: jax.Array | None) -> Attend:
    """Attention over rows of this shape [B, T] with these segments, int32 [B, T] (None: each row is one). What all layers
    share is made here, once."""
    return plain_attention(config, shape, segment_ids)
