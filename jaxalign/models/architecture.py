"""What a decoder is made of: its sizes, and the choices in which model families differ."""

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
    """Rotary frequencies changed for longer texts than a model was first trained on.

    kind "linear": all are divided by `factor`. kind "llama3": those whose wave is longer than original_positions /
    low_factor are, those shorter than original_positions / high_factor are not, and between the two it goes over smoothly
    (the Llama 3.1 models' own rule; The Llama 3 Herd of Models, arXiv 2407.21783, changes the base only).
    """

    kind: str
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `count` of them of width `DecoderConfig.mlp`, `per_token` at work.

    normalise: the weights of a token's experts are brought to the sum 1.
    """

    count: int
    per_token: int
    normalise: bool = True

    def __post_init__(self):
        if not 1 <= self.per_token <= self.count:
            raise UserError(f"{self.per_token} experts are asked for at each token, but the model has {self.count}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of one decoder. `compute_dtype` is a numpy name; parameters are float32 unless they are frozen.

    Attributes beyond the sizes:
      vocab_multiple: the tables have a multiple of this many rows; those beyond `vocab` are never seen from outside.
      rotary_dim: how many of a head's dimensions, the first ones, are turned; None for all. Of an odd number the last one is
        turned with the dimension after it, as Hugging Face's GPT-NeoX does.
      window: how many keys a query sees, its own included; None for all before it.
      local_layers: which layers have the window; empty for all of them.
      local_rope_base: the base of those layers where it is another (they are not scaled).
      attention_scale: what scores are multiplied by; None for head_dim ** -0.5.
      attention_softcap, final_softcap: scores and logits x become cap * tanh(x / cap).
      head_norm: queries and keys are normed by head, before the rotation.
      sandwich_norms: attention and MLP are normed before and after.
      parallel_residual: attention and MLP read the same activations.
      scale_embeddings: embeddings are multiplied by the root of their width.
      cache_dtype: of keys and values while tokens are sampled: "compute", "float32", "bfloat16" or "int8".
      attention: "plain", "fused", or what suits the platform (`jaxalign.models.attention.dispatch`).
      remat: the backward pass computes each layer again and keeps only what goes into it,
      remat_saves: and, with "products", the results of its matrix products with weights.
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
    head_norm: bool = False
    sandwich_norms: bool = False
    parallel_residual: bool = False
    scale_embeddings: bool = False
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
                f"model.head_dim is {self.head_dim}, of which {turned} are turned by rotary positions; they need an even number"
            )
        if self.activation not in ACTIVATIONS or self.norm not in NORMS:
            raise ValueError(f"activation {self.activation!r} of {ACTIVATIONS} and norm {self.norm!r} of {NORMS} are expected")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention {self.attention!r} of {ATTENTION} is expected")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype {self.cache_dtype!r} of {CACHE_DTYPES} is expected")
        if self.local_layers and (len(self.local_layers) != self.layers or self.window is None):
            raise ValueError("local_layers needs one entry a layer, and a window")

    @property
    def table_rows(self) -> int:
        """Rows of the embedding: the vocabulary, and what pads it."""
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
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def windows(self, local: bool) -> int | None:
        """The window of local layers, or of the others."""
        everywhere = not self.local_layers or (all(self.local_layers))
        return self.window if local or everywhere else None

    def frequencies(self, local: bool = False) -> jax.Array:
        """float32 [rotary_dim / 2]: by how many radians a position turns each pair, in local layers or in the others."""
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        own_base = local and self.local_rope_base is not None
        base = self.local_rope_base if own_base else self.rope_base
        found = base ** (-jnp.arange(0, turned, 2, dtype=jnp.float32) / turned)
        return found if own_base or self.rope_scaling is None else _scaled(found, self.rope_scaling)


def _scaled(frequency: jax.Array, scaling: RopeScaling) -> jax.Array:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind != "llama3":
        raise ValueError(f"rotary scaling {scaling.kind!r} is not known")
    turns = scaling.original_positions * frequency / (2 * math.pi)
    kept = jnp.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0.0, 1.0)
    return frequency * (kept + (1 - kept) / scaling.factor)
