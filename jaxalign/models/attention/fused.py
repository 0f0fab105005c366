"""Attention in one kernel, forward and backward, so that [T, T] scores never reach memory: on a TPU the Pallas kernel "splash
attention" that comes with JAX, on an NVIDIA GPU that of cuDNN.

Dimension letters: B batch, T time, H query heads, K key/value heads, h head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from jaxalign.models.architecture import DecoderConfig
from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.sharding import Sharding

LANES = 128  # Splash attention's blocks are multiples of this, so rows are padded to one.
LARGEST_BLOCK = 512
CUDNN_HEAD_DIM = 128  # What every GPU that has the kernel takes.


def cudnn_refusal(config: DecoderConfig) -> str | None:
    """Why cuDNN's kernel cannot serve this model; None where it can."""
    if config.compute_dtype not in ("bfloat16", "float16"):
        return f"cuDNN's kernel computes in bfloat16 or float16, and model.compute_dtype is {config.compute_dtype}"
    if config.attention_softcap is not None:
        return "cuDNN's kernel has no soft cap of the scores, which this model has"
    if config.head_dim % 8 or config.head_dim > CUDNN_HEAD_DIM:
        return f"cuDNN's kernel takes heads of a multiple of 8 up to {CUDNN_HEAD_DIM}, and this model's have {config.head_dim}"
    return None


def by_layer(config: DecoderConfig, make: Callable) -> Callable:
    """`attend(q, k, v, local)` from `make(window)`, a function of (q, k, v) for layers with this window."""

    def attend(q, k, v, local):
        if local is None:
            return make(config.windows(False))(q, k, v)
        return jax.lax.cond(local, make(config.windows(True)), make(config.windows(False)), q, k, v)

    return attend


def splash_attention(
    config: DecoderConfig, sharding: Sharding | None, segment_ids: jax.Array | None, interpret: bool = False
) -> Callable:
    """`attend(q, k, v, local)` by splash attention: see `dispatch`. interpret: computed by JAX itself, step by
    step, on any platform."""

    def make(window: int | None):
        kernel = functools.partial(_splash, window, config.scale, config.attention_softcap, interpret)
        if sharding is None:
            return lambda q, k, v: kernel(q, k, v, segment_ids)
        spec = sharding.spec
        queries, keys = spec(("batch", None, "heads", None)), spec(("batch", None, "kv_heads", None))
        split = on_each_device(sharding, kernel, (queries, keys, keys, spec(("batch", None))), queries)
        return lambda q, k, v: split(q, k, v, segment_ids)

    return by_layer(config, make)


def _splash(window: int | None, scale: float, cap: float | None, interpret: bool, q, k, v, segment_ids) -> jax.Array:
    """One device's rows and heads. The kernel takes [H, T, h], one row, and queries that are scaled already."""
    T, H = q.shape[1], q.shape[2]
    padded = -(-T // LANES) * LANES

    def pad(x):
        return jnp.pad(x, ((0, 0), (0, padded - T)) + ((0, 0),) * (x.ndim - 2))

    def rows(x):
        return pad(x).swapaxes(1, 2)

    whole = splash.CausalMask((padded, padded))
    mask = whole if window is None else splash.LocalMask((padded, padded), (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H), block_sizes=_blocks(padded), head_shards=1, q_seq_shards=1,
        attn_logits_soft_cap=cap, interpret=interpret,
    )  # fmt: skip
    segments = None if segment_ids is None else splash.SegmentIds(pad(segment_ids), pad(segment_ids))
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    out = jax.vmap(kernel)(rows(scaled), rows(k), rows(v), segments)
    return out.swapaxes(1, 2)[:, :T]


def _blocks(T: int) -> splash.BlockSizes:
    size = next(size for size in range(LARGEST_BLOCK, 0, -LANES) if T % size == 0)
    return splash.BlockSizes(size, size, size, size, size, size, size, size)


def cudnn_attention(config: DecoderConfig, segment_ids: jax.Array | None, implementation: str = "cudnn") -> Callable:
    """`attend(q, k, v, local)` by `jax.nn.dot_product_attention`: see `dispatch`.

    Segments are a dense mask [B, 1, T, T], the same for all heads and layers: the kernel knows causality and windows, but not
    packed rows. implementation "xla" computes the same on any platform.
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
