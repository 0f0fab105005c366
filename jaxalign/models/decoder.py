"""One decoder-only transformer in Flax NNX: RMSNorm, rotary positions, grouped-query attention, gated MLP.

The modules describe the architecture; `jaxalign.models.model.Model` splits them once and runs them as pure functions.
Layers are stacked on a leading axis and scanned, so compile time does not grow with depth.

Dimension letters: B batch, T time, S cache slots, D model, H query heads, K key/value heads, h head dim, F mlp, L layers,
V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxalign.errors import UserError

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
_NEGATIVE = -1e30  # Finite, so that a row without any visible key gives numbers and not NaN.


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of one decoder. `compute_dtype` is a numpy name; parameters are always float32."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    compute_dtype: str = "float32"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(f"model.heads is {self.heads}; it must be a multiple of model.kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise UserError(f"model.head_dim is {self.head_dim}; rotary positions need an even number")


class Cache(NamedTuple):
    """Keys [L, B, K, h, S] and values [L, B, K, S, h] of every layer, in the compute dtype.

    So each is what its matrix product over the slots reads as it lies: with the heads inside the slots, a CPU copies the
    whole cache at every step.
    """

    keys: jax.Array
    values: jax.Array


def rotate(x_BxTxHxh: jax.Array, positions_BxT: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding, halves convention (RoFormer, arXiv 2104.09864; layout of Hugging Face Llama)."""
    half = x_BxTxHxh.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BxT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x_BxTxHxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxh.dtype)


def attend(q_BxTxHxh: jax.Array, k_BxSxKxh: jax.Array, v_BxSxKxh: jax.Array, mask_BxTxS: jax.Array) -> jax.Array:
    """Grouped-query attention, softmax in float32. mask is True where query t may see key s. Returns [B, T, H, h]."""
    B, T, H, h = q_BxTxHxh.shape
    K = k_BxSxKxh.shape[2]
    q = q_BxTxHxh.reshape(B, T, K, H // K, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_BxSxKxh, preferred_element_type=jnp.float32) * (h**-0.5)
    scores = jnp.where(mask_BxTxS[:, None, None, :, :], scores, _NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxSxKxh.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BxSxKxh).reshape(B, T, H, h)


def attend_cache(q_Bx1xHxh: jax.Array, k_BxKxhxS: jax.Array, v_BxKxSxh: jax.Array, mask_BxS: jax.Array) -> jax.Array:
    """`attend` for one query a row, over keys and values as a `Cache` holds them. Returns [B, 1, H, h]."""
    B, _, H, h = q_Bx1xHxh.shape
    K = k_BxKxhxS.shape[1]
    q = q_Bx1xHxh.reshape(B, K, H // K, h)
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, k_BxKxhxS, preferred_element_type=jnp.float32) * (h**-0.5)
    scores = jnp.where(mask_BxS[:, None, None, :], scores, _NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxKxSxh.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, v_BxKxSxh).reshape(B, 1, H, h)


def _as_keys(k_BxTxKxh: jax.Array) -> jax.Array:
    return k_BxTxKxh.transpose(0, 2, 3, 1)


def _as_values(v_BxTxKxh: jax.Array) -> jax.Array:
    return v_BxTxKxh.transpose(0, 2, 1, 3)


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    def __init__(self, config: DecoderConfig):
        self.scale = nnx.Param(jnp.ones((config.embed,), jnp.float32), axes=("norm",))
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (normed * jnp.expand_dims(self.scale[...], range(x.ndim - 1))).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, H, K, h = config.embed, config.heads, config.kv_heads, config.head_dim
        self.config = config
        self.query = _param(rngs, (D, H, h), ("embed", "heads", "head_dim"), D**-0.5)
        self.key = _param(rngs, (D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.value = _param(rngs, (D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.out = _param(rngs, (H, h, D), ("heads", "head_dim", "embed"), (H * h) ** -0.5 / (2 * config.layers) ** 0.5)

    def project(self, x_BxTxD: jax.Array, positions_BxT: jax.Array, constrain: Constrain):
        """Rotated queries [B, T, H, h] and keys, and values [B, T, K, h]."""
        dtype, base = x_BxTxD.dtype, self.config.rope_base
        q = jnp.einsum("btd,dnh->btnh", x_BxTxD, self.query[...].astype(dtype))
        k = jnp.einsum("btd,dnh->btnh", x_BxTxD, self.key[...].astype(dtype))
        v = jnp.einsum("btd,dnh->btnh", x_BxTxD, self.value[...].astype(dtype))
        q = constrain(q, ("batch", "length", "heads", "head_dim"))
        k = constrain(k, ("batch", "length", "kv_heads", "head_dim"))
        v = constrain(v, ("batch", "length", "kv_heads", "head_dim"))
        return rotate(q, positions_BxT, base), rotate(k, positions_BxT, base), v

    def merge(self, heads_BxTxHxh: jax.Array) -> jax.Array:
        return jnp.einsum("btnh,nhd->btd", heads_BxTxHxh, self.out[...].astype(heads_BxTxHxh.dtype))


class GatedMLP(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, F = config.embed, config.mlp
        self.gate = _param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up = _param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down = _param(rngs, (F, D), ("mlp", "embed"), F**-0.5 / (2 * config.layers) ** 0.5)

    def __call__(self, x_BxTxD: jax.Array, constrain: Constrain) -> jax.Array:
        dtype = x_BxTxD.dtype
        hidden = jax.nn.silu(x_BxTxD @ self.gate[...].astype(dtype)) * (x_BxTxD @ self.up[...].astype(dtype))
        return constrain(hidden, ("batch", "length", "mlp")) @ self.down[...].astype(dtype)


class Block(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x_BxTxD, positions_BxT, constrain: Constrain, attention: Callable):
        """`attention(q, k, v) -> (heads, extra)`; returns the new activations and `extra` (what a cache keeps)."""
        q, k, v = self.attention.project(self.attention_norm(x_BxTxD), positions_BxT, constrain)
        heads, extra = attention(q, k, v)
        x_BxTxD = constrain(x_BxTxD + self.attention.merge(heads), ("batch", "length", "embed"))
        x_BxTxD = x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD), constrain)
        return constrain(x_BxTxD, ("batch", "length", "embed")), extra


class Decoder(nnx.Module):
    """Tokens to final hidden states, with an LM head (tied or not), a scalar head, or both on top.

    Parameters: `embedding` [V, D], `blocks` (every leaf with a leading L), `final_norm`, then `unembedding` [D, V] when
    there is an LM head and it is untied, and `score` [D] where there is a scalar head ("scalar", "lm_scalar").
    """

    def __init__(self, config: DecoderConfig, head: str, *, rngs: nnx.Rngs):
        if head not in ("lm", "scalar", "lm_scalar"):
            raise ValueError(f"head is {head!r}; 'lm', 'scalar' or 'lm_scalar' is expected")
        self.config = config
        self.embedding = _param(rngs, (config.vocab, config.embed), ("vocab", "embed"), config.embed**-0.5)
        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(params=key)))(keys)
        self.final_norm = RMSNorm(config)
        if head != "lm":  # Stiennon et al. 2020 start the reward head at N(0, 1/(D+1)).
            self.score = _param(rngs, (config.embed,), ("norm",), (config.embed + 1) ** -0.5)
        if head != "scalar" and not config.tie_embeddings:
            self.unembedding = _param(rngs, (config.embed, config.vocab), ("embed", "vocab"), config.embed**-0.5)

    def _embed(self, tokens: jax.Array, constrain: Constrain) -> jax.Array:
        # Gathered over fsdp first: a lookup whose result is split over the batch cannot use a table split over D.
        table = constrain(self.embedding[...].astype(self.config.compute_dtype), ("vocab", None))
        x = table[tokens]
        return constrain(x, ("batch", "length", "embed"))

    def hidden(self, tokens_BxT, positions_BxT, mask_BxTxT, constrain: Constrain, keep_cache: bool = False):
        """Final hidden states [B, T, D]; with `keep_cache` also the keys and values of every layer (T slots)."""
        graph, layers = nnx.split(self.blocks)

        def body(x, layer):
            def attention(q, k, v):
                return attend(q, k, v, mask_BxTxT), (_as_keys(k), _as_values(v)) if keep_cache else None

            return nnx.merge(graph, layer)(x, positions_BxT, constrain, attention)

        x, kept = jax.lax.scan(body, self._embed(tokens_BxT, constrain), layers)
        x = self.final_norm(x)
        return (x, Cache(*kept)) if keep_cache else x

    def decode(self, tokens_B, positions_B, mask_BxS, cache: Cache, slot: jax.Array, constrain: Constrain):
        """One token a row: writes its keys and values at `slot` of the cache. Returns hidden [B, D] and the new cache."""
        graph, layers = nnx.split(self.blocks)

        def body(carry, indexed):
            x, cache = carry
            index, layer = indexed

            def attention(q, k, v):
                keys = jax.lax.dynamic_update_slice(cache.keys, _as_keys(k)[None], (index, 0, 0, 0, slot))
                values = jax.lax.dynamic_update_slice(cache.values, _as_values(v)[None], (index, 0, 0, slot, 0))
                return attend_cache(q, keys[index], values[index], mask_BxS), Cache(keys, values)

            x, cache = nnx.merge(graph, layer)(x, positions_B[:, None], constrain, attention)
            return (x, cache), None

        start = (self._embed(tokens_B[:, None], constrain), cache)
        (x, cache), _ = jax.lax.scan(body, start, (jnp.arange(self.config.layers), layers))
        return self.final_norm(x)[:, 0], cache
