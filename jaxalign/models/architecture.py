"""The architecture of a decoder: its sizes, and the options in which model families differ."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
CACHE_DTYPES = ("compute", "float32", "bfloat16", "int8")
ATTENTION = ("auto", "plain", "fused")
NORMS = ("rms", "rms_plus_one", "layer")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for longer contexts than a model was first trained on.

    kind "linear": all frequencies are divided by `factor`. kind "llama3": frequencies with a wavelength above
    original_positions / low_factor are divided, those with one below original_positions / high_factor are unchanged, and the
    ones in between are interpolated (the rule of the released Llama 3.1 models; arXiv 2407.21783 describes only the new base).
    kind "yarn": the same with a ramp over the pairs of dimensions: those that make more than `high_factor` turns within the
    original positions are unchanged, those with fewer than `low_factor` turns are divided (YaRN, arXiv 2309.00071). kind
    "longrope": pair i is divided by divisors[i] (LongRoPE, arXiv 2402.13753).

    Further attributes:
      magnitude: a factor of the rotated dimensions of queries and keys.
      whole_pairs: the ends of YaRN's ramp are rounded to whole pairs.
      positions: the number of positions for which the frequencies hold; None for all.
    """

    kind: str
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_positions: int = 8192
    magnitude: float = 1.0
    whole_pairs: bool = True
    divisors: tuple[float, ...] = ()
    positions: int | None = None


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `count` experts of width `DecoderConfig.mlp`, `per_token` active per token.

    normalise: scale the weights of each token's experts to sum to 1.
    """

    count: int
    per_token: int
    normalise: bool = True

    def __post_init__(self):
        if not 1 <= self.per_token <= self.count:
            raise UserError(f"{self.per_token} experts per token are requested, but the model has {self.count}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of one decoder. `compute_dtype` is a numpy name; parameters are float32 unless they are frozen.

    Attributes beyond the sizes:
      vocab_multiple: embedding tables are padded to a multiple of this many rows; no caller sees the padding.
      rotary_dim: the number of leading dimensions of a head that are rotated; None for all. If it is odd, the last one is
        paired with the dimension after it, as in Hugging Face's GPT-NeoX.
      window: the number of keys that a query sees, including its own; None for all earlier keys.
      local_layers: which layers have the window; empty for all of them.
      local_rope_base: the rotary base of local layers, whose frequencies are then not scaled; None for `rope_base`.
      attention_scale: the factor that multiplies attention scores; None for head_dim ** -0.5.
      attention_softcap, final_softcap: scores and logits x become cap * tanh(x / cap).
      unrotated_layers: which layers do not rotate queries and keys; empty for none of them.
      head_norm: queries and keys are normalised per head, before the rotation; with joint_head_norm over all heads together.
      sandwich_norms: norms both before and after attention and MLP; without pre_norms only after them.
      parallel_residual: attention and MLP read the same activations.
      scale_embeddings: embeddings are multiplied by the square root of their width.
      embedding_factor, residual_factor, logit_factor: factors of the embeddings, of the outputs of attention and MLP before
        they are added to the residual stream, and of the logits.
      cache_dtype: the dtype of cached keys and values during generation: "compute", "float32", "bfloat16" or "int8".
      attention: "plain", "fused", or "auto" for the best one on the platform (`jaxalign.models.attention.dispatch`).
      remat: the backward pass recomputes each layer from its input.
      remat_saves: "products" makes remat also keep the results of the layer's matrix products with weights, except those of
        experts.
    """

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
    vocab_multiple: int = 1
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    local_rope_base: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    unrotated_layers: tuple[bool, ...] = ()
    head_norm: bool = False
    joint_head_norm: bool = False
    sandwich_norms: bool = False
    pre_norms: bool = True
    parallel_residual: bool = False
    scale_embeddings: bool = False
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    experts: Experts | None = None
    remat: bool = False
    remat_saves: str = "nothing"
    attention: str = "auto"
    cache_dtype: str = "compute"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(f"model.heads is {self.heads}; it must be a multiple of model.kv_heads ({self.kv_heads})")
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim + self.rotary_dim % 2
        if turned % 2 or turned > self.head_dim:
            raise UserError(
                f"model.head_dim is {self.head_dim}, but rotary positions rotate {turned} of its dimensions; they need an even "
                "number of at most head_dim"
            )
        if self.activation not in ACTIVATIONS or self.norm not in NORMS:
            raise ValueError(f"activation {self.activation!r} must be in {ACTIVATIONS}, and norm {self.norm!r} in {NORMS}")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention is {self.attention!r}; one of {ATTENTION} is expected")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype is {self.cache_dtype!r}; one of {CACHE_DTYPES} is expected")
        if self.local_layers and (len(self.local_layers) != self.layers or self.window is None):
            raise ValueError("local_layers needs one entry per layer, and a window")
        if self.unrotated_layers and len(self.unrotated_layers) != self.layers:
            raise ValueError("unrotated_layers needs one entry per layer")
        given = 0 if self.rope_scaling is None else len(self.rope_scaling.divisors)
        if given and given != turned // 2:
            raise UserError(f"the rotary positions (short_factor) have {given} factors, but rotate {turned // 2} pairs of "
                            "dimensions; one factor for each pair is expected")

    @property
    def table_rows(self) -> int:
        """Rows of the embedding: the vocabulary and its padding."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def stored_dtype(self) -> str:
        """The dtype of cached keys and values."""
        return self.compute_dtype if self.cache_dtype == "compute" else self.cache_dtype

    @property
    def mixed_layers(self) -> bool:
        """Whether some layers have the window and others do not."""
        return len(set(self.local_layers)) > 1

    @property
    def scale(self) -> float:
        """The factor that multiplies attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def windows(self, local: bool) -> int | None:
        """The window of the local layers, or of the other layers."""
        everywhere = not self.local_layers or (all(self.local_layers))
        return self.window if local or everywhere else None

    def frequencies(self, local: bool = False) -> jax.Array:
        """float32 [rotary_dim / 2]: radians per position for each pair of dimensions, in local or in other layers."""
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        scaling = self._scaling(local)
        base = self.local_rope_base if local and self.local_rope_base is not None else self.rope_base
        frequencies = base ** (-jnp.arange(0, turned, 2, dtype=jnp.float32) / turned)
        return frequencies if scaling is None else _scaled(frequencies, scaling, base)

    def magnitude(self, local: bool = False) -> float:
        """The factor of the rotated dimensions of queries and keys, in local or in other layers."""
        scaling = self._scaling(local)
        return 1.0 if scaling is None else scaling.magnitude

    def _scaling(self, local: bool) -> RopeScaling | None:
        return None if local and self.local_rope_base is not None else self.rope_scaling


def _scaled(frequency: jax.Array, scaling: RopeScaling, base: float) -> jax.Array:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "longrope":
        return frequency / jnp.asarray(scaling.divisors, jnp.float32)
    if scaling.kind == "yarn":
        kept = _yarn_kept(len(frequency), scaling, base)
    elif scaling.kind == "llama3":
        turns = scaling.original_positions * frequency / (2 * math.pi)
        kept = jnp.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0.0, 1.0)
    else:
        raise ValueError(f"rotary scaling {scaling.kind!r} is unknown")
    return frequency * (kept + (1 - kept) / scaling.factor)


def _yarn_kept(pairs: int, scaling: RopeScaling, base: float) -> jax.Array:
    """float32 [pairs]: the share of each pair's frequency that is not divided."""

    def pair(turns: float) -> float:
        """The pair of dimensions that makes this many turns within the original positions."""
        return pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair(scaling.high_factor), pair(scaling.low_factor)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (jnp.arange(pairs, dtype=jnp.float32) - first) / (last - first if last != first else 0.001)
    return 1 - jnp.clip(ramp, 0.0, 1.0)
