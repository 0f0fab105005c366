"""Chooses the attention implementation for whole rows. The decoder's layers call the result of `attention` and see no masks.

A query sees the keys of its own segment at its own and earlier positions; in a layer with a window, only the last `window` of
them. If `reads_branches` is true, a segment may be a branch (`attention.plain.STEM`), which also sees its stem.
docs/attention.md lists when each implementation is used and what it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax

from jaxalign.errors import UserError
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.blocked import blocked_attention
from jaxalign.models.attention.fused import LANES, cudnn_attention, cudnn_refusal, splash_attention
from jaxalign.models.attention.plain import plain_attention
from jaxalign.models.attention.ring import ring_attention
from jaxalign.models.layers import keep
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.zigzag import context_size

# attend(q [B, T, H, h], k [B, T, K, h], v [B, T, K, h], local) -> [B, T, H, h] in the dtype of v. local: bool [], whether the
# layer has the window; None if all layers are alike.
Attend = Callable[[jax.Array, jax.Array, jax.Array, "jax.Array | None"], jax.Array]


def kind_of_attention(config: DecoderConfig, sharding: Sharding, rows: int, T: int, keep_cache: bool = False) -> str:
    """The implementation for `rows` rows of T tokens: "plain", "ring", "splash" or "cudnn".

    keep_cache: keys and values are kept for decoding, in the order of the row. Raises UserError if config.attention is "fused"
    and no fused kernel can be used.
    """
    if config.attention == "plain":
        return "plain"
    if context_size(sharding) > 1 and not keep_cache:
        if config.attention == "fused":
            raise UserError("config.model.attention is 'fused', but config.mesh.context splits the rows, which no fused kernel "
                            "supports; set model.attention to 'auto' (ring attention) or mesh.context to 1")
        return "ring"
    kernel, refusal = _kernel(config, sharding, rows)
    if config.attention == "fused":
        if refusal is not None:
            raise UserError(f"config.model.attention is 'fused', but {refusal}; set it to 'auto' or 'plain'")
        return kernel
    return kernel if refusal is None and T >= LANES else "plain"


def reads_branches(config: DecoderConfig, sharding: Sharding) -> bool:
    """Whether rows may contain documents that split into branches. Fused kernels and ring attention support only segments, a
    window would count the tokens of other branches, and the experts' load counts the tokens in the rows."""
    plain = config.attention == "plain" or (sharding.platform == "cpu" and config.attention != "fused")
    return plain and context_size(sharding) == 1 and config.windows(True) is None and config.experts is None


def _kernel(config: DecoderConfig, sharding: Sharding, rows: int) -> tuple[str, str | None]:
    """The platform's kernel, and the reason why it cannot be used, or None."""
    platform = sharding.platform
    if platform == "tpu":
        split = sharding.batch_size
        uneven = f"splash attention needs rows that the mesh splits evenly, and {rows} is not a multiple of {split}"
        if config.compute_dtype == "float16":
            return "splash", "splash attention computes in bfloat16 or float32, and config.model.compute_dtype is float16"
        return "splash", uneven if rows % split else None
    if platform == "gpu":
        foreign = "the GPU is not an NVIDIA GPU, and the kernel is part of cuDNN"
        return "cudnn", cudnn_refusal(config) if sharding.nvidia else foreign
    return "plain", f"the platform, {platform}, has no fused kernel (a TPU and an NVIDIA GPU have one)"


def attention(
    kind: str, config: DecoderConfig, sharding: Sharding, shape: tuple[int, int], segment_ids: jax.Array | None
) -> Attend:
    """Attention of this kind over rows of this shape [B, T] with these segments, int32 [B, T] (None: each row is one segment).
    Whatever all layers share is computed here, once. For "ring", the rows must be distributed by `zigzag.deal`."""
    blocked = kind == "plain" and context_size(sharding) == 1  # Marks by itself the results to keep.
    if blocked:
        attend = blocked_attention(config, shape, segment_ids, sharding.mesh.size > 1)
    elif kind == "ring":
        attend = ring_attention(config, sharding, segment_ids)
    elif kind == "splash":
        attend = splash_attention(config, sharding, segment_ids)
    elif kind == "cudnn":
        attend = cudnn_attention(config, segment_ids)
    else:
        attend = plain_attention(config, shape, segment_ids)

    def checked(q, k, v, local):
        chex.assert_rank([q, k, v], 4)
        chex.assert_equal_shape([k, v])
        chex.assert_equal_shape([q, k], dims=(0, 1, 3))
        chex.assert_is_divisible(q.shape[2], k.shape[2])
        heads = attend(q, k, v, local)
        return heads if blocked else keep(heads)

    return checked
