"""Fused attention kernels, forward and backward, which never write [T, T] scores to memory: on a TPU the Pallas kernel "splash
attention" of JAX, on an NVIDIA GPU the kernel of cuDNN.

Dimension letters: B batch, T time, H query heads, K key/value heads, h head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxalign.models.architecture import DecoderConfig
from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.sharding import Sharding

LANES = 128  # Splash attention's blocks are multiples of this, so rows are padded to a multiple of it.
LARGEST_BLOCK = 512
CUDNN_HEAD_DIM = 128  # The largest head_dim that every GPU with the kernel supports.


def cudnn_refusal(config: DecoderConfig) -> str | None:
    """Why cuDNN's kernel cannot be used for this model; None if it can."""
    if config.compute_dtype not in ("bfloat16", "float16"):
        return f"cuDNN's kernel computes in bfloat16 or float16, and model.compute_dtype is {config.compute_dtype}"
    if config.attention_softcap is not None:
        return "cuDNN's kernel has no soft cap for scores, which this model needs"
    if config.head_dim % 8 or config.head_dim > CUDNN_HEAD_DIM:
        return f"cuDNN's kernel needs a head_dim of a multiple of 8 up to {CUDNN_HEAD_DIM}; this model's is {config.head_dim}"
    return None


def by_layer(config: DecoderConfig, make: Callable) -> Callable:
    """`attend(q, k, v, local)`, where `make(window)` gives the function of (q, k, v) for layers with this window."""

    def attend(q, k, v, local):
        if local is None:
            return make(config.windows(False))(q, k, v)
        return jax.lax.cond(local, make(config.windows(True)), make(config.windows(False)), q, k, v)

    return attend


def splash_attention(
    config: DecoderConfig, sharding: Sharding, segment_ids: jax.Array | None, interpret: bool = False
) -> Callable:
    """`attend(q, k, v, local)` with splash attention: see `dispatch`. interpret: run the kernel in Pallas's interpreter, on any
    platform."""

    def make(window: int | None):
        kernel = functools.partial(_splash, window, config.scale, config.attention_softcap, interpret)
        spec = sharding.spec
        queries, keys = spec(("batch", None, "heads", None)), spec(("batch", None, "kv_heads", None))
        split = on_each_device(sharding, kernel, (queries, keys, keys, spec(("batch", None))), queries)
        return lambda q, k, v: split(q, k, v, segment_ids)

    return by_layer(config, make)


def _splash(window: int | None, scale: float, cap: float | None, interpret: bool, q, k, v, segment_ids) -> jax.Array:
    """Attention for one device's rows and heads. The kernel takes one row, [H, T, h], and queries that are already scaled."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Large, so it is imported here.

    T, H = q.shape[1], q.shape[2]
    padded = -(-T // LANES) * LANES
    size = next(size for size in range(LARGEST_BLOCK, 0, -LANES) if padded % size == 0)
    whole = splash.CausalMask((padded, padded))
    mask = whole if window is None else splash.LocalMask((padded, padded), (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H), block_sizes=splash.BlockSizes(*[size] * 8), head_shards=1, q_seq_shards=1,
        attn_logits_soft_cap=cap, interpret=interpret,
    )
    segments = None
    if segment_ids is not None:
        padded_ids = jnp.pad(segment_ids, ((0, 0), (0, padded - T)))
        segments = splash.SegmentIds(padded_ids, padded_ids)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (jnp.pad(x, ((0, 0), (0, padded - T), (0, 0), (0, 0))).swapaxes(1, 2) for x in (scaled, k, v))
    out = jax.vmap(kernel)(q, k, v, segments)
    return out.swapaxes(1, 2)[:, :T]


def cudnn_attention(config: DecoderConfig, segment_ids: jax.Array | None, implementation: str = "cudnn") -> Callable:
    """`attend(q, k, v, local)` with `jax.nn.dot_product_attention`: see `dispatch`.

    The kernel supports causality and windows but not packed rows, so segments become a dense mask [B, 1, T, T], shared by all
    heads and layers. implementation "xla" computes the same on any platform.
    """

    def make(window: int | None):
        def attend(q, k, v):
            T = q.shape[1]
            odd = T % 2 if segment_ids is not None else 0  # With a mask the kernel's gradient needs an even length.
            q, k, v = (jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (q, k, v))
            mask, near = None, None if window is None else (window - 1, 0)
            if segment_ids is not None:
                segments = jnp.pad(segment_ids, ((0, 0), (0, odd)))
                mask = (segments[:, :, None] == segments[:, None, :])[:, None]
                if window is not None:
                    place = jnp.arange(T + odd)
                    mask, near = mask & (place[:, None] - place[None, :] < window)[None, None], None
            out = jax.nn.dot_product_attention(
                q, k, v, mask=mask, scale=config.scale, is_causal=True, local_window_size=near, implementation=implementation
            )
            return out[:, :T]

        return attend

    return by_layer(config, make)
