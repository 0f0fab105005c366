"""Chooses the kernel of attention over whole rows: the decoder's layers call the result of `attention` and see no masks.

A query sees the keys of its own segment that stand before it in the row or where it stands itself, and of those, in a layer
with a window, the nearest `window`. A segment may be a branch (`attention_plain.STEM`), which sees its stem too, where
`reads_branches` says so. docs/attention.md says which implementation serves when, and what each needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.extend.backend import get_backend

from jaxalign.errors import UserError
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.blocked import blocked_attention
from jaxalign.models.attention.fused import LANES, cudnn_attention, cudnn_refusal, splash_attention
from jaxalign.models.attention.plain import plain_attention
from jaxalign.models.attention.ring import ring_attention
from jaxalign.models.layers import keep
from jaxalign.parallel.sharding import Sharding, platform_of
from jaxalign.parallel.zigzag import context_size

# attend(q [B, T, H, h], k [B, T, K, h], v [B, T, K, h], local) -> [B, T, H, h] in the dtype of v. local: bool [], whether the
# layer has the window; None where all layers are alike.
Attend = Callable[[jax.Array, jax.Array, jax.Array, "jax.Array | None"], jax.Array]


def kind_of_attention(config: DecoderConfig, sharding: Sharding | None, rows: int, T: int, keep_cache: bool = False) -> str:
    """"plain", "ring", "splash" or "cudnn": what serves `rows` rows of T tokens.

    keep_cache: keys and values are kept for decoding, in the order of the row. Raises UserError where config.attention is
    "fused" and no kernel can.
    """
    if config.attention == "plain":
        return "plain"
    if context_size(sharding) > 1 and not keep_cache:
        if config.attention == "fused":
            raise UserError("config.model.attention is 'fused', but config.mesh.context splits the rows, which no fused kernel "
                            "reads whole; set model.attention to 'auto' (ring attention) or mesh.context to 1")
        return "ring"
    kernel, refusal = _kernel(config, sharding, rows)
    if config.attention == "fused":
        if refusal is not None:
            raise UserError(f"config.model.attention is 'fused', but {refusal}; set it to 'auto' or 'plain'")
        return kernel
    return kernel if refusal is None and T >= LANES else "plain"


def reads_branches(config: DecoderConfig, sharding: Sharding | None) -> bool:
    """Whether rows may hold documents that part into branches: where no kernel can serve, since the kernels know of segments
    alone; not with a window, which counts the slots between, nor with experts, whose load counts what stands in the rows."""
    plain = config.attention == "plain" or (platform_of(sharding) == "cpu" and config.attention != "fused")
    return plain and context_size(sharding) == 1 and config.windows(True) is None and config.experts is None


def _kernel(config: DecoderConfig, sharding: Sharding | None, rows: int) -> tuple[str, str | None]:
    """The platform's kernel, and why it cannot serve, if it cannot."""
    platform = platform_of(sharding)
    if platform == "tpu":
        split = 1 if sharding is None else _parts(sharding, "batch")
        uneven = f"splash attention needs rows that the mesh splits evenly, and {rows} are not a multiple of {split}"
        if config.compute_dtype == "float16":
            return "splash", "splash attention computes in bfloat16 or float32, and config.model.compute_dtype is float16"
        return "splash", uneven if rows % split else None
    if platform == "gpu":
        nvidia = "cuda" in get_backend("gpu").platform_version
        return "cudnn", cudnn_refusal(config) if nvidia else "the GPU here is not one of NVIDIA's, whose cuDNN has the kernel"
    return "plain", f"the platform here, {platform}, has no fused kernel (a TPU and an NVIDIA GPU have one)"


def _parts(sharding: Sharding, axis: str) -> int:
    return math.prod(sharding.mesh.shape[name] for name in sharding.spec((axis,))[0] or ())


def attention(
    kind: str, config: DecoderConfig, sharding: Sharding | None, shape: tuple[int, int], segment_ids: jax.Array | None
) -> Attend:
    """Attention of this kind over rows of this shape [B, T] with these segments, int32 [B, T] (None: each row is one). What
    all layers share is made here, once. Of the kind "ring" rows are dealt out by `zigzag.deal`."""
    if kind == "plain" and context_size(sharding) == 1:
        return blocked_attention(config, shape, segment_ids, sharding is not None)
    if kind == "ring":
        attend = ring_attention(config, sharding, segment_ids)
    elif kind == "splash":
        attend = splash_attention(config, sharding, segment_ids)
    elif kind == "cudnn":
        attend = cudnn_attention(config, segment_ids)
    else:
        attend = plain_attention(config, shape, segment_ids)
    return lambda q, k, v, local: keep(attend(q, k, v, local))
